"""The folder that tokens are written to, and which state it is in.

FOLDER/plan.json                                what is tokenized and how; before all else
FOLDER/tokenizer.json, tokenizer_config.json    for the workers, and for training
FOLDER/tokens-00000.bin ...                     the ids
FOLDER/documents.jsonl, skipped.jsonl           a line for each document, for each bad record
FOLDER/progress.json                            the journal: how much of these files counts
FOLDER/index.json                               last: the folder can be trained on

empty        work begins
plan         work was cut off, and goes on if its plan is the same; where no token was kept, any
             plan may take its place
index        finished; the plan, the journal and the lines of documents are removed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from megaspeed.data.errors import DataError
from megaspeed.data.tokenizing.journal import NOTHING_DONE, Journal
from megaspeed.data.tokenizing.output import DOCUMENTS, JOURNAL, SKIPPED
from megaspeed.data.tokenizing.plan import Plan, differences
from megaspeed.data.tokenizing.sealed_record import read_record, write_record
from megaspeed.data.tokens.token_folder import INDEX, PLAN, SHARDS
from megaspeed.files.durable import TEMPORARY, flush_folder

_LOCK = ".lock"
_SCAFFOLDING = (PLAN, JOURNAL, DOCUMENTS)
_ALL = (INDEX, *_SCAFFOLDING, SKIPPED, SHARDS, "tokenizer.json", "tokenizer_config.json")


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Makes the folder if need be; the kernel frees the lock of a process that died.

    Raises:
        DataError: another process writes to it, or it cannot be written to.
    """
    lock = FileLock(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        raise DataError(
            f"one process at a time writes to a folder, and another one is writing to {folder}; "
            "wait until it has ended, or name another --output"
        ) from error
    except OSError as error:
        raise DataError(
            f"tokens are written to a folder, and {folder} cannot be made or written to "
            f"({error.strerror}); name another --output"
        ) from error
    try:
        yield
    finally:
        lock.release()


def begin(folder: Path, plan: Plan, *, skip_bad: bool) -> Journal:
    """What is done already under this plan; of an empty folder nothing, and it has a plan now.

    Raises:
        DataError: the folder is finished, or holds something that cannot be gone on with.
    """
    if (folder / INDEX).exists():
        remove_scaffolding(folder)  # a kill may have left it
        raise DataError(
            f"{folder} is finished and holds tokens; name another --output, or --fresh to make it "
            "anew"
        )
    before = read_record(folder / PLAN, Plan)
    if before is None:
        _refuse_others(folder)
        write_record(folder / PLAN, plan)
        return NOTHING_DONE
    journal = read_record(folder / JOURNAL, Journal) or NOTHING_DONE
    differing = "; ".join(differences(before, plan))
    drops_option = journal.passed_over.records > 0 and not skip_bad
    if (differing or drops_option) and journal.shards.tokens == 0:
        return _begin_anew(folder, plan)
    if differing:
        raise DataError(
            f"the tokenization in {folder} goes on as it was begun, and {differing}. Restore that, "
            "name another --output, or --fresh to begin anew"
        )
    if drops_option:
        raise DataError(
            f"the tokenization in {folder} has passed over {journal.passed_over.records} bad "
            f"records under --skip-bad (they are in {folder / SKIPPED}); give it again, or --fresh "
            "to begin anew"
        )
    return journal


def clear(folder: Path) -> None:
    """Removes what a tokenization has left; what else is in the folder stays."""
    if _is_ours(folder):
        _remove(folder, _ALL)


def remove_scaffolding(folder: Path) -> None:
    """Removes what is of use only until the folder is finished."""
    _remove(folder, _SCAFFOLDING)


def _begin_anew(folder: Path, plan: Plan) -> Journal:
    """With another plan, because nothing is lost: the first one may have been a mistake."""
    # The old journal goes first: it must never stand beside the new plan.
    _remove(folder, (JOURNAL,))
    write_record(folder / PLAN, plan)
    return NOTHING_DONE


def _is_ours(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in (PLAN, INDEX, SHARDS))


def _refuse_others(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if name != _LOCK and not name.endswith(TEMPORARY)]
    if others:
        mend = ", or --fresh to make it anew" if _is_ours(folder) else ""
        raise DataError(
            f"tokens are written to a new or empty folder, and {folder} has {len(others)} entries "
            f"that cannot be gone on with, the first {others[0]}; name another --output{mend}"
        )


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        for path in folder.glob(name):
            path.unlink()
    flush_folder(folder)
