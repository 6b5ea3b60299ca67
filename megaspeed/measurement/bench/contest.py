"""Which peers can train a run, and the rows of a benchmark.

    row                          trains
    megaspeed                    the complete training job
    hf-deepspeed defaults        a peer with its defaults,
    hf-deepspeed guide           and as its guide recommends
    megaspeed host-bound         the same contestants, on the host-bound workload
    ...

The host-bound workload has the run's depth, layout, dtype and micro-batches, but its blocks are so
narrow and its samples so short that a step takes as long as the host needs to launch it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.bench.job import train_megaspeed
from megaspeed.measurement.bench.peers import DeepspeedPipeline, HfDeepspeed, Settings
from megaspeed.measurement.timed_steps import Steps, take_turn
from megaspeed.measurement.torch_trainers import Ddp, Fsdp2, Plain, refusal
from megaspeed.measurement.turns import Row

MEGASPEED = "megaspeed"
RUN, HOST_BOUND = "run", "host-bound"

TRAINERS: Mapping[tuple[str, Settings | None], Callable[..., Any]] = MappingProxyType(
    {
        ("plain", None): Plain,
        ("hf-deepspeed", "defaults"): partial(HfDeepspeed, settings="defaults"),
        ("hf-deepspeed", "guide"): partial(HfDeepspeed, settings="guide"),
        ("fsdp2", "defaults"): Fsdp2,
        ("fsdp2", "guide"): partial(Fsdp2, guided=True),
        ("ddp", None): Ddp,
        ("deepspeed-pipeline", None): DeepspeedPipeline,
    }
)
"""Peer and settings -> what a rank trains with. A peer whose guide recommends other settings than
its defaults takes turns with both."""

PEERS = tuple(dict.fromkeys(peer for peer, _ in TRAINERS))

_TINY_WIDTH, _TINY_HEADS, _TINY_TOKENS, _TINY_VOCABULARY = 64, 4, 16, 512
_TINY_CORPUS_TOKENS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Contestant(Row):
    """megaspeed, or a peer with some settings, on one workload."""

    name: str
    settings: Settings | None  # None if it has only one set of settings
    workload: str


def workloads_of(
    run: Run, steps: Steps, folder: Path, omitted: Sequence[str] = ()
) -> dict[str, Run]:
    """Return the run, and the host-bound workload, if it is not omitted, with its tokens in
    ``folder``. Both have a step more than a turn.
    """
    both = {RUN: run}
    if HOST_BOUND not in omitted:
        both[HOST_BOUND] = host_bound(run, folder / "tokens.bin")
    return {workload: benchmarked(each, steps.total + 1) for workload, each in both.items()}


def contestants_of(
    workloads: Mapping[str, Run], peers: Sequence[str], omitted: Sequence[str] = ()
) -> Iterator[Contestant]:
    """Yield megaspeed, if not omitted, and each peer with its settings, on each workload."""
    pairs: list[tuple[str, Settings | None]] = [] if MEGASPEED in omitted else [(MEGASPEED, None)]
    pairs += [pair for pair in TRAINERS if pair[0] in peers]
    for workload, run in workloads.items():
        for name, settings in pairs:
            words = (name, settings, workload if workload != RUN else None)
            yield Contestant(
                label=" ".join(word for word in words if word),
                run=run,
                name=name,
                settings=settings,
                workload=workload,
            )


def part_of_turn(
    corpora: Mapping[str, PreparedCorpus], folder: Path, steps: Steps, row: Contestant, number: int
) -> tuple[Callable[..., Any], *tuple[Any, ...]]:
    """Return what the ranks of a turn call. megaspeed's run folder is in ``folder``."""
    if row.name == MEGASPEED:
        values, file = row.run.as_json(), folder / f"{row.workload}-{number}.json"
        values["training"]["run_dir"] = str(file.with_suffix(""))
        file.write_text(json.dumps(values), encoding="utf-8")
        return train_megaspeed, file, row.run.precision, steps
    return take_turn, TRAINERS[row.name, row.settings], row.run, corpora[row.workload], steps


def choose_peers(run: Run, names: Sequence[str] | None) -> dict[str, str | None]:
    """Return peers in a fixed order -> why a peer cannot train the run; None if it can.

    Args:
        run: the run.
        names: peers that must be able to train it; if None, all that are able take part.

    Raises:
        ConfigError: a named peer cannot train the run, or no peer can.
    """
    reasons = {peer: _refusal(peer, run) for peer in PEERS if names is None or peer in names}
    problems = [f"{peer}: {reason}" for peer, reason in reasons.items() if reason is not None]
    if problems and (names is not None or len(problems) == len(reasons)):
        raise ConfigError(problems, where=f"the peers of {run.name}")
    return reasons


def _refusal(peer: str, run: Run) -> str | None:
    """Why a peer cannot train the run; None if it can."""
    config, model = run.config, run.config.model
    reason = refusal(run, has_pipeline=peer == "deepspeed-pipeline")
    if reason is not None or peer in ("plain", "ddp", "fsdp2"):
        return reason
    if peer == "deepspeed-pipeline" and run.grid.pp == 1:
        return "it needs a pipeline, but parallel.pipeline is 1; set it to 2 or more"
    if peer == "deepspeed-pipeline" and run.zero_stage > 1:
        stage = run.zero_stage
        return (
            f"its ZeRO stage is at most 1, but zero_optimization.stage is {stage}; set it to 0 or 1"
        )
    parallel = config.parallel
    if parallel.activation_checkpointing == "selective" or parallel.recomputed_blocks is not None:
        return (
            "it recomputes complete blocks, all or none; set parallel.activation_checkpointing to "
            '"none" or "full", and remove parallel.recomputed_blocks'
        )
    if run.zero_stage == 0 and run.precision == "bf16" and run.accumulation_dtype == "fp32":
        return (
            "DeepSpeed adds gradients of bf16 weights in fp32 only with ZeRO, but "
            "zero_optimization.stage is 0; set it to 1"
        )
    if config.data.reset_at_documents:
        return "it attends across documents; set data.reset_at_documents to false"
    rates = (model.embedding_dropout, model.attention_dropout, model.residual_dropout)
    if any(rates) and (peer == "deepspeed-pipeline" or model.architecture != "gpt2"):
        return "its model has no dropout; set every dropout of the model to 0"
    if peer == "hf-deepspeed":
        try:
            hugging_face_config(model)
        except ConfigError as error:
            return "; ".join(error.problems)
    return None


def host_bound(run: Run, tokens: Path) -> Run:
    """Return the run with blocks of width 64 and samples of 16 random tokens, one in a micro-batch.

    Args:
        run: the run.
        tokens: the file that the tokens are written to.
    """
    random = np.random.default_rng(seed=0)
    random.integers(_TINY_VOCABULARY, size=_TINY_CORPUS_TOKENS, dtype=np.uint16).tofile(tokens)
    values, model = run.as_json(), run.config.model
    heads, shared = _TINY_HEADS, model.num_key_value_heads < model.num_attention_heads
    values["model"] |= {
        "vocab_size": _TINY_VOCABULARY,
        "hidden_size": _TINY_WIDTH,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if shared else heads,
        "head_dim": _TINY_WIDTH // heads,
        "intermediate_size": (2 if model.mlp == "swiglu" else 4) * _TINY_WIDTH,
        "max_position_embeddings": _TINY_TOKENS,
    }
    values["data"] = {
        "train": [str(tokens)],
        "validation_fraction": 0.0,
        "sequence_length": _TINY_TOKENS,
        "seed": run.config.data.seed,
    }
    values["train_micro_batch_size_per_gpu"] = 1
    values["train_batch_size"] = run.grid.dp * run.batch.gradient_accumulation_steps
    for name in ("reduce_bucket_size", "stage3_param_persistence_threshold"):
        values["zero_optimization"].pop(name, None)  # they follow from the width
    return _resolved(run, values)


def benchmarked(run: Run, steps: int) -> Run:
    """Return the run with this many steps, and without what would only take time after them.

    The learning rate is constant, because a warmup must be shorter than the run.
    """
    values = run.as_json()
    values.pop("scheduler", None)
    values["training"] |= {
        "steps": steps,
        "save_interval": 0,
        "eval_interval": 0,
        "eval_batches": 1,
        "report_to": [],
        "restart": 0,
        "async_save": False,
        "profile": None,
    }
    return _resolved(run, values)


def _resolved(run: Run, values: dict[str, Any]) -> Run:
    return resolve_run(
        parse_config(values), World(run.grid.world_size, "--world-size"), name=run.name
    )
