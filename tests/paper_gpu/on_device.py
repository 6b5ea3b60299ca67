"""Train each feature once on the real device: the cheapest way to find a crash.

    python -m tests.paper_gpu.on_device RESULTS

    for each case:  one rank of a fake world -> two steps -> an evaluation -> the likeliest tokens
    on a GPU also:  torch's FlashAttention within documents and windows, beside a mask

RESULTS gets lines of JSON for each case: at the start of all, when it begins, and when it has
ended. The last line counts. Cases that have begun already are not run. After some CUDA errors,
every later CUDA call in the process fails. Others end the process. So the cases run in a child
process. If it ends early, a new child runs the remaining cases.
"""

import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from megaspeed.model.documents import attends_without_mask
from megaspeed.model.dropout import random_key
from megaspeed.model.micro_batch import NOT_COUNTED
from megaspeed.supervision.answers import describe
from megaspeed.supervision.process_end import ended_on_termination
from megaspeed.tensor_parallel import weight_gradients
from megaspeed.tensor_parallel.drawing import Draw
from tests.paper_gpu.fake_world import GPT2, LLAMA, MOE, batches, fake_rank, paper_run
from tests.support.tiny import merge

_STEPS = 2
_DEVICE: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


_CPU = {"device": "cpu"}
_LLAMA = {"model": LLAMA}
_FOUR_BLOCKS = {"model": {**LLAMA, "num_hidden_layers": 4}}
_DOCUMENTS = {"data": {"reset_at_documents": True}}
_DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "residual_dropout": 0.1}
_CHUNKS = {"parallel": {"virtual_stages": 2, "micro_batch_groups": 2}, "pp": 2, "dp": 2}
_OFFLOADED = {"parallel": {"activation_checkpointing": "full_offloaded"}}
_FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 1024}}
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
_COMPILED = {"training": {"compile": True}}


def _family(name: str, **model: Any) -> dict[str, Any]:
    return {"model": {**LLAMA, "architecture": name, **model}}


CASES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "2 chunks on 2 stages, ZeRO-3, first": (
        _zero(3, stage3_param_persistence_threshold=0) | {"gradient_accumulation_steps": 4},
        *(_FOUR_BLOCKS, _CHUNKS, {"rank": 0}),
    ),
    "2 chunks on 2 stages, ZeRO-3, last": (
        _zero(3) | {"gradient_accumulation_steps": 4},
        *(_FOUR_BLOCKS, _CHUNKS, {"rank": 3}),
    ),
    "3 chunks on 2 stages, gathered ahead": (
        _zero(3, stage3_param_persistence_threshold=0) | {"gradient_accumulation_steps": 4},
        _family("llama", num_hidden_layers=6),
        merge(_CHUNKS, {"parallel": {"virtual_stages": 3}}),
        {"rank": 2},
    ),
    "replicas, ZeRO-3": ({"dp": 4, "parallel": {"replicate": 2}}, _zero(3), _LLAMA),
    "replicas, ZeRO-1": ({"dp": 4, "parallel": {"replicate": 2}}, _zero(1), _LLAMA),
    "ulysses": (
        {"cp": 2, "dp": 2, "parallel": {"context_method": "ulysses"}},
        *(_zero(3), _LLAMA),
    ),
    "all_gather, documents": (
        {"cp": 2, "dp": 2, "parallel": {"context_method": "all_gather"}, "rank": 3},
        *(_zero(2), _LLAMA, _DOCUMENTS),
    ),
    "tensor, sequence parallel": (
        {"tp": 2, "dp": 2, "parallel": {"sequence_parallel": True}},
        *(_zero(2), _LLAMA),
    ),
    "pipeline, more in flight": (
        {"pp": 2, "dp": 2, "parallel": {"extra_in_flight": 1}},
        *(_zero(2), {"gradient_accumulation_steps": 4}),
    ),
    "pipeline, tensor, data, last": ({"pp": 2, "dp": 2, "tp": 2, "rank": 7}, _zero(3)),
    "norms after, over all heads": ({"tp": 2, "dp": 2}, _zero(1), _family("olmo2")),
    "parallel residual, partial rotary": (
        _zero(1),
        _family("gpt_neox", partial_rotary_factor=0.5, num_key_value_heads=4),
    ),
    "multipliers": (_zero(1), _family("granite", **_MULTIPLIERS)),
    "dropout": ({"dp": 2, "model": {**GPT2, **_DROPOUT}}, _zero(2)),
    "documents": ({"dp": 2}, _zero(3), _LLAMA, _DOCUMENTS),
    "documents, no shared heads": ({"model": GPT2}, _zero(1), _DOCUMENTS),
    "window": ({"dp": 2}, _zero(1), _family("mistral", sliding_window=6)),
    "experts": ({"dp": 2, "model": MOE}, _zero(3)),
    "experts, context, recomputed": (
        {"cp": 2, "dp": 2, "model": MOE, "parallel": {"activation_checkpointing": "full"}},
        _zero(2),
    ),
    "full_offloaded": ({"dp": 2}, _zero(3), _OFFLOADED, _LLAMA),
    "offload, ZeRO-2": ({"dp": 2}, _zero(2, offload_optimizer=_CPU)),
    "offload, ZeRO-3": ({"dp": 2}, _zero(3, offload_optimizer=_CPU, offload_param=_CPU)),
    "int8": ({"dp": 2, "parallel": {"gradient_compression": {"type": "int8"}}}, _zero(1)),
    "Muon, tensor": (
        {"tp": 2, "dp": 2, "optimizer": {"type": "Muon"}, "rank": 3},
        *(_zero(1), _LLAMA),
    ),
    "Muon, replicas, ZeRO-3": (
        {"dp": 4, "parallel": {"replicate": 2}, "optimizer": {"type": "Muon"}},
        *(_zero(3), _LLAMA),
    ),
    "fp16": ({"dp": 2}, _FP16, _zero(1)),
    "fp32": ({"bf16": {"enabled": False}}, _zero(1)),
    "compiled, ZeRO-3, documents": ({"dp": 2}, _zero(3), _LLAMA, _DOCUMENTS, _COMPILED),
    "compiled, tensor, sequence parallel": (
        {"tp": 2, "dp": 2, "parallel": {"sequence_parallel": True}},
        *(_zero(1), _LLAMA, _COMPILED),
    ),
    "compiled, dropout": ({"dp": 2, "model": {**GPT2, **_DROPOUT}}, _zero(1), _COMPILED),
    "compiled, no_rope, partly full_offloaded": (
        _family("smollm3", num_hidden_layers=4, no_rope_layer_interval=2),
        merge(_OFFLOADED, {"parallel": {"recomputed_blocks": 2}}),
        *(_zero(3), _COMPILED),
    ),
}
"""Name -> JSON keys of ``paper_run``, merged in this order; ``rank`` is the rank it acts as."""


def train_on_device(changes: dict[str, Any]) -> None:
    """Train, evaluate and sample. Raises AssertionError if a step or the loss is not finite."""
    rank = changes.pop("rank", 0)
    run = paper_run(device_type=_DEVICE, **changes)
    micro_batches = run.batch.gradient_accumulation_steps
    with fake_rank(run, rank) as worker:
        load = batches(run, worker.context.device)
        for _ in range(_STEPS):
            assert not worker.train_step(load, 1e-3).skipped, "the step was skipped"
        loss = worker.evaluate(load, micro_batches, run.tokens_per_step)
        assert math.isfinite(loss), f"the loss of the evaluation is {loss}"
        batch = load(0)
        targets = torch.full_like(batch.targets, NOT_COUNTED)
        targets[:, -1] = 0
        draw = Draw(random_key("sample"), 0.8, top_k=5)
        tokens = worker.next_tokens([replace(batch, targets=targets)] * micro_batches, draw)
        assert len(tokens) == micro_batches * run.batch.micro_batch_size


def compare_attention() -> None:
    """Compare torch's FlashAttention within documents and windows with a mask."""
    from tests.paper_gpu.rows_of_documents import CONFIGS, compare_with_mask

    device = torch.device(_DEVICE)
    kernel = [
        config
        for config in CONFIGS.values()
        if attends_without_mask(config, device, torch.bfloat16)
    ]
    assert kernel, "no configuration uses the kernel"
    for config in kernel:
        compare_with_mask(config, device)


def add_products() -> None:
    """Add products of 16-bit matrices to sums in fp32, beside fp64, with the kernel if it exists.

    Without the kernel, a product is rounded before, which an error of 1e-3 shows.
    """
    device = torch.device(_DEVICE)
    allowed = 1e-5 if weight_gradients._adds_wider(device) else 1e-2
    for dtype, width in product((torch.bfloat16, torch.float16), (256, 264)):
        a, b = (torch.randn(512, size, device=device, dtype=dtype) for size in (width, 320))
        total = torch.randn(width, 320, device=device)
        exact = total.double() + a.double().t() @ b.double()
        weight_gradients.add_product(total, a, b)
        error = float((total - exact).norm() / exact.norm())
        assert error < allowed, f"the sum in {dtype} of width {width} has an error of {error}"


def checks() -> dict[str, Callable[[], None]]:
    """Return what is checked on this machine, by name."""
    found: dict[str, Callable[[], None]] = {}
    if _DEVICE == "cuda":
        found["attention within documents"] = compare_attention
    found["products added to sums"] = add_products
    for case, changes in CASES.items():
        if case != "fp16" or _DEVICE == "cuda":
            found[case] = partial(train_on_device, reduce(merge, changes))
    return found


_CHILD = (sys.executable, "-m", "tests.paper_gpu.on_device")
_NOT_REACHED = "not reached"


def main(results: Path, child: Sequence[str] = _CHILD) -> int:
    """Run all checks in children. Return 1 if a check has failed, or if none has run."""
    results.touch()
    known, code = -1, -1
    with ended_on_termination():
        # A child that adds no line would do so again.
        while code != 0 and known < (known := len(read(results))):
            with subprocess.Popen([*child, str(results), "child"]) as process:
                try:
                    code = process.wait()
                finally:
                    process.kill()
    problems = {line["case"]: line["problem"] for line in read(results)}
    return int(any(problems.values()) or not problems)


def read(results: Path) -> list[dict[str, Any]]:
    """Return the lines of the file."""
    return [json.loads(line) for line in results.read_text().splitlines()]


def run_checks(results: Path) -> int:
    """Run the checks that have not begun according to ``results``. Return 0 if none is left."""
    known, found = read(results), checks()
    begun = {line["case"] for line in known if line["problem"] != _NOT_REACHED}
    with results.open("a") as lines:

        def note(case: str, problem: str | None, seconds: float = 0.0) -> None:
            line = {"case": case, "problem": problem, "seconds": round(seconds, 2)}
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        for case in found.keys() - {line["case"] for line in known}:
            note(case, _NOT_REACHED)
        for case, check in found.items():
            if case in begun:
                continue
            note(case, "the process ended during this case")
            begin, problem = time.perf_counter(), None
            try:
                check()
            except Exception as error:
                sys.stderr.write(f"---- {case}\n")
                traceback.print_exc()
                problem = f"{type(error).__name__}: {describe(error).splitlines()[0]}"
            note(case, problem, time.perf_counter() - begin)
            if problem is not None and not _device_answers():
                return 1
    return 0


def _device_answers() -> bool:
    try:
        torch.ones(1, device=_DEVICE).item()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    function = run_checks if sys.argv[2:] == ["child"] else main
    sys.exit(function(Path(sys.argv[1])))
