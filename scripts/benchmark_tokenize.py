"""``megaspeed tokenize`` beside a plain loop over the same tokenizer.

    python scripts/benchmark_tokenize.py

The text is the Python standard library as JSON lines, repeated several times. The tokenizer is a
byte-level BPE trained on it. These take turns, each in a new process, and medians are printed:

    plain loop       json.loads and tokenizer.encode for one document at a time, ids to a file
    encode_batch     the same with 1,000 documents at a time, on the threads of ``tokenizers``
    tokenize         the command with 1 process, 2, 4, ... up to every core

All must write the same bytes. Seconds are those of the complete process, including the start of
workers. CPU seconds are those of all processes together; on a busy machine they are more reliable
than the clock.

Then the peak memory of the command and all its workers is measured, for the text and for ten times
the text.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
from tokenizers import Tokenizer

from megaspeed.config.data import Source
from megaspeed.data.documents import read_documents
from megaspeed.data.search import find
from megaspeed.data.sources import files_by_source
from megaspeed.data.tokenizer import train_tokenizer

DOCUMENTS_AT_ONCE = 1000
POLL_SECONDS = 0.02
TENFOLD = 10


def main() -> int:
    """Measure and print two Markdown tables."""
    options = parse_arguments()
    if options.plain is not None:
        plain_loop(*options.plain, at_once=options.at_once)
        return 0
    with tempfile.TemporaryDirectory(prefix="tokenize-", dir=options.folder) as folder:
        place = Path(folder)
        tokenizer = prepare(place, options)
        compare_speed(place, tokenizer, options)
        if not options.no_memory:
            compare_memory(place, tokenizer, options)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=2, help="how often the library is repeated")
    parser.add_argument("--files", type=int, help="of the standard library (all)")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=powers_of_two())
    parser.add_argument("--no-memory", action="store_true", help="omit the second table")
    parser.add_argument("--folder", type=Path, help="where a temporary folder is made")
    parser.add_argument("--plain", type=Path, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--at-once", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def powers_of_two() -> list[int]:
    """Return 1, 2, 4, ... below the number of cores, and that number."""
    cores = len(os.sched_getaffinity(0))
    return sorted({*(1 << power for power in range(cores.bit_length())), cores} - {0})


def prepare(folder: Path, options: argparse.Namespace) -> Path:
    """Write the text once and ten times, and a tokenizer for it."""
    (files,) = files_by_source(find([Source(path="python-stdlib")], "INPUT"), "INPUT", report=False)
    files = files[: options.files]
    train_tokenizer(read_documents(files), options.vocab_size).save(folder / "tokenizer")
    lines = [json.dumps({"text": file.path.read_text("utf-8")}) + "\n" for file in files]
    (folder / "text.jsonl").write_text("".join(lines) * options.copies)
    with (folder / "tenfold.jsonl").open("w") as stream:
        for _ in range(TENFOLD * options.copies):
            stream.writelines(lines)
    return folder / "tokenizer"


def plain_loop(text: Path, tokenizer_file: Path, output: Path, *, at_once: int) -> None:
    """Run a simple program without megaspeed that encodes ``at_once`` documents in a call."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.encode_special_tokens = True
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    with text.open() as stream, output.open("wb") as written:
        texts = (text for line in stream if (text := json.loads(line)["text"]))
        while some := list(islice(texts, at_once)):
            if at_once == 1:
                encoded = [tokenizer.encode(some[0], add_special_tokens=False)]
            else:
                encoded = tokenizer.encode_batch_fast(some, add_special_tokens=False)
            for encoding in encoded:
                written.write(np.asarray([*encoding.ids, end_of_text], dtype="<u2").tobytes())


def compare_speed(folder: Path, tokenizer: Path, options: argparse.Namespace) -> None:
    text, output = folder / "text.jsonl", folder / "plain.bin"
    script: list[str | Path] = [sys.executable, __file__, "--plain"]
    script += [text, tokenizer / "tokenizer.json", output]
    contestants: dict[str, Callable[[], bytes]] = {
        "plain loop": lambda: plain_bytes(script, output),
        "encode_batch": lambda: plain_bytes([*script, "--at-once", str(DOCUMENTS_AT_ONCE)], output),
    }
    for processes in options.processes:
        name = f"tokenize, {processes} process{'es' if processes > 1 else ''}"
        contestants[name] = partial(tokenize, text, tokenizer, folder / "out", processes)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    busy: dict[str, list[float]] = {name: [] for name in contestants}
    expected = contestants["plain loop"]()  # warms the page cache, and is not counted
    for _ in range(options.turns):
        for name, contestant in contestants.items():
            start, busy_before = time.perf_counter(), children_cpu_seconds()
            written = contestant()
            seconds[name].append(time.perf_counter() - start)
            busy[name].append(children_cpu_seconds() - busy_before)
            assert written == expected, f"{name} does not write what the plain loop writes"
    tokens = len(expected) // 2
    megabytes = text.stat().st_size / 1e6
    print(
        f"{megabytes:.0f} MB of JSON lines, {tokens:,} tokens, vocabulary {options.vocab_size}, "
        f"{len(os.sched_getaffinity(0))} cores, medians of {options.turns} turns\n"
    )
    print("| | tokens/s | MB/s | beside the plain loop | CPU seconds |\n|---|---|---|---|---|")
    for name, turns in seconds.items():
        median = statistics.median(turns)
        # Each turn is compared with the plain loop of the same turn, because the load may change.
        ratio = statistics.median(
            plain / own for plain, own in zip(seconds["plain loop"], turns, strict=True)
        )
        print(
            f"| {name} | {tokens / median:,.0f} | {megabytes / median:.2f} | {ratio:.2f} "
            f"| {statistics.median(busy[name]):.1f} |"
        )


def children_cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended, and of their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def plain_bytes(command: Sequence[str | Path], output: Path) -> bytes:
    subprocess.run(command, check=True)
    return output.read_bytes()


def tokenize(text: Path, tokenizer: Path, output: Path, processes: int) -> bytes:
    process = start_tokenize(text, tokenizer, output, processes)
    assert process.wait() == 0
    return (output / "tokens-00000.bin").read_bytes()


def start_tokenize(text: Path, tokenizer: Path, output: Path, processes: int) -> psutil.Popen:
    script = "from megaspeed.cli import main; raise SystemExit(main())"
    options = ["--tokenizer", tokenizer, "--output", output, "--processes", str(processes)]
    return psutil.Popen(
        [sys.executable, "-c", script, "tokenize", text, *options, "--fresh"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def compare_memory(folder: Path, tokenizer: Path, options: argparse.Namespace) -> None:
    print("\n| memory of all processes | text | ten times the text | ratio |\n|---|---|---|---|")
    for processes in options.processes:
        once, tenfold = (
            peak_bytes(start_tokenize(folder / name, tokenizer, folder / "out", processes))
            for name in ("text.jsonl", "tenfold.jsonl")
        )
        print(
            f"| {processes} and the reader | {once / 1e6:.0f} MB | {tenfold / 1e6:.0f} MB "
            f"| {tenfold / once:.3f} |"
        )


def peak_bytes(process: psutil.Popen) -> int:
    """Return the peak memory of a process and its children together, until it ends."""
    most = 0
    while process.poll() is None:
        try:
            family = [process, *process.children(recursive=True)]
            most = max(most, sum(one.memory_info().rss for one in family))
        except psutil.NoSuchProcess:
            pass  # a child has just ended
        time.sleep(POLL_SECONDS)
    assert process.returncode == 0
    return most


if __name__ == "__main__":
    sys.exit(main())
