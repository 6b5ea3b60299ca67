"""Compares the inputs that must be the same on every rank, once, before training starts.

Each node reads its own files. If they differ, ranks would train on different text, or hang in a
collective that the others do not call. An error names the ranks and the inputs that differ.
"""

import torch.distributed as dist

from megaspeed.checkpoint.run_state import NOT_STATED
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.meeting import RanksDisagree


def check_agreement(corpus: PreparedCorpus, context: ParallelContext) -> None:
    """Compares texts and tokenizer with rank 0's; a collective over all ranks.

    Raises:
        RanksDisagree: on every rank; names what differs and on which ranks.
    """
    own = {
        "the training text (data.train)": corpus.fingerprint,
        "the validation text (data.validation)": _validation_fingerprint(corpus),
        "the tokenizer (data.tokenizer)": corpus.tokenizer_fingerprint or NOT_STATED,
    }
    everyones: list[dict[str, str]] = [{} for _ in range(context.grid.world_size)]
    dist.all_gather_object(everyones, own, context.world_group)
    differing = [
        f"{what} of rank 0 and of ranks {ranks}"
        for what in own
        if (ranks := [r for r, other in enumerate(everyones) if other[what] != everyones[0][what]])
    ]
    if differing:
        raise RanksDisagree(
            f"All ranks must train on the same input, but {'; '.join(differing)} are not the same. "
            "Give every node the same files, byte for byte."
        )


def _validation_fingerprint(corpus: PreparedCorpus) -> str:
    return "none" if corpus.validation is None else corpus.validation.fingerprint
