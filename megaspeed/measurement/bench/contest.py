"""Which peers can train a run, and the turns that the contestants take.

    turn 1    megaspeed   hf-deepspeed defaults   hf-deepspeed guide   ddp    each a launch of its
    turn 2    megaspeed   hf-deepspeed defaults   hf-deepspeed guide   ddp    own, which trains
    ...                                                                1. the host-bound workload
                                                                       2. the run

A peer whose guide recommends other settings than its defaults takes turns with both.

The host-bound workload has the run's depth, layout, dtype and micro-batches, but its blocks are so
narrow and its samples so short that a step takes as long as the host needs to launch it.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.data.corpus import prepare_corpus
from megaspeed.measurement.bench.peers import PEERS, WITH_A_GUIDE, PeerName, Settings
from megaspeed.measurement.bench.turn import (
    WARM_UP_STEPS,
    Device,
    Turn,
    train_megaspeed,
    train_peer,
)
from megaspeed.measurement.local_ranks import DeviceType, run_on_ranks
from megaspeed.measurement.turns import take_turns
from megaspeed.topology.launch import free_port

MEGASPEED = "megaspeed"
RUN, HOST_BOUND = "run", "host-bound"

_TINY_WIDTH, _TINY_HEADS, _TINY_TOKENS, _TINY_VOCABULARY = 64, 4, 16, 512
_TINY_CORPUS_TOKENS = 1 << 16


@dataclass
class Contestant:
    """megaspeed, or a peer with some settings, and what its turns measured."""

    name: str
    settings: Settings | None  # None if it has only one set of settings
    turns: dict[str, list[list[Turn]]] = field(default_factory=dict)  # workload -> turn -> rank
    devices: list[Device] = field(default_factory=list)  # of each rank in each turn
    failure: str | None = None  # why a turn failed; the contestant takes no turn after it

    @property
    def title(self) -> str:
        """Unique among the contestants."""
        return self.name if self.settings is None else f"{self.name} {self.settings}"


def choose_peers(run: Run, names: Sequence[PeerName] | None) -> dict[PeerName, str | None]:
    """Peers in a fixed order -> why a peer cannot train the run; None if it can.

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


def _refusal(peer: PeerName, run: Run) -> str | None:
    """Why a peer cannot train the run; None if it can."""
    grid, config, model = run.grid, run.config, run.config.model
    zero = config.zero_optimization
    if grid.tp > 1:
        return f"it has no tensor axis, but parallel.tensor is {grid.tp}; set it to 1"
    if run.precision == "fp16":
        return "it is run without a loss scale, but fp16.enabled is true; set bf16.enabled instead"
    if zero.offloads_optimizer or zero.offloads_parameters:
        return "it is run without offload; remove it from zero_optimization"
    if peer != "deepspeed-pipeline" and grid.pp > 1:
        return f"it has only a data axis, but parallel.pipeline is {grid.pp}; set it to 1"
    if peer == "deepspeed-pipeline":
        if grid.pp == 1:
            return "it needs a pipeline, but parallel.pipeline is 1; set it to 2 or more"
        if run.zero_stage > 1:
            return (
                "its ZeRO stage is at most 1, but zero_optimization.stage is "
                f"{run.zero_stage}; set it to 0 or 1"
            )
    if peer in ("plain", "ddp", "fsdp2"):
        return None
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
    """The run with blocks of width 64 and samples of 16 random tokens, one in a micro-batch.

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


def contestants_of(peers: Sequence[PeerName], omitted: Sequence[str]) -> list[Contestant]:
    """The contestants of a turn: megaspeed, if not omitted, and each peer with its settings."""
    both: tuple[Settings, ...] = ("defaults", "guide")
    listed = [] if MEGASPEED in omitted else [Contestant(MEGASPEED, None)]
    for peer in peers:
        listed += [Contestant(peer, each) for each in (both if peer in WITH_A_GUIDE else (None,))]
    return listed


def hold_contest(
    run: Run,
    peers: Sequence[PeerName],
    *,
    omitted: Sequence[str] = (),
    turns: int,
    steps: int,
    device_type: DeviceType,
    folder: Path,
    timeout_seconds: float,
    on_turn: Callable[[int, str], None] = lambda done, text: None,
) -> tuple[list[Contestant], dict[str, Run], bool]:
    """Lets megaspeed and the peers take turns, each of ``steps`` timed steps of each workload.

    Each of the peers can train the run. ``omitted`` may name megaspeed and the host-bound workload.
    ``folder`` exists; the output of each turn's ranks goes to a file in its ``logs``. The time
    limit is that of one turn. For ``on_turn``, see ``take_turns``.

    Returns the contestants, the run of each workload, and whether Ctrl-C or a signal has stopped
    them. If no turn had ended by then, KeyboardInterrupt is raised.
    """
    listed = {each.title: each for each in contestants_of(peers, omitted)}
    with tempfile.TemporaryDirectory(prefix="turns-", dir=folder) as name:
        place = Path(name)
        both = {HOST_BOUND: host_bound(run, place / "tokens.bin"), RUN: run}
        runs = {
            workload: _benchmarked(each, steps)
            for workload, each in both.items()
            if workload not in omitted
        }
        corpora = [
            prepare_corpus(each.config.data, each.config.model.vocab_size) for each in runs.values()
        ]

        def launch(title: str, number: int, log: Path) -> Sequence[tuple[list[Turn], Device]]:
            each = listed[title]
            part: tuple[Any, ...]
            if title == MEGASPEED:
                part = (train_megaspeed, _configs(runs, place, number), steps, run.precision)
            else:
                part = (train_peer, each.name, each.settings, [*runs.values()], corpora, steps)
            return run_on_ranks(
                *part,
                world_size=run.grid.world_size,
                device_type=device_type,
                log=log,
                timeout_seconds=timeout_seconds,
            )

        results, failures, stopped = take_turns(
            [*listed], turns, launch, folder=folder, on_turn=on_turn
        )
    contestants = [
        replace(
            each,
            turns={
                workload: [[turns[index] for turns, _ in ranks] for ranks in results[title]]
                for index, workload in enumerate(runs)
            },
            devices=[device for ranks in results[title] for _, device in ranks],
            failure=failures.get(title),
        )
        for title, each in listed.items()
    ]
    return contestants, runs, stopped


def _benchmarked(run: Run, steps: int) -> Run:
    """The run with as many steps as a turn has, and without what would only take time after it.

    The learning rate is constant, because a warmup must be shorter than the run.
    """
    values = run.as_json()
    values.pop("scheduler", None)
    values["training"] |= {
        "steps": WARM_UP_STEPS + steps + 1,
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


def _configs(runs: dict[str, Run], place: Path, number: int) -> list[tuple[Path, int]]:
    """For each workload of megaspeed's turn, the file of its configuration, and a port."""
    configs = []
    for workload, run in runs.items():
        values = run.as_json()
        values["training"]["run_dir"] = str(place / f"{workload}-{number}")
        file = place / f"{workload}-{number}.json"
        file.write_text(json.dumps(values), encoding="utf-8")
        configs.append((file, free_port()))
    return configs
