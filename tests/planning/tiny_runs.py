"""Small trainings for plans (12 heads, 4 blocks), the trainings of ds_configs, and clusters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config, read_config
from megaspeed.config.resolve import resolve_run
from megaspeed.config.run import RunConfig
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.variants import Training
from megaspeed.topology.devices import DEVICES
from tests.config.small import patch, small, write

FOLDER = Path(__file__).parents[2] / "ds_configs"

WORLD_SIZES = {
    "base": 4,
    "zero0": 4,
    "zero1": 4,
    "zero2": 4,
    "zero3": 4,
    "zero3_offload": 4,
    "muon": 8,
    "experts": 8,
    "3d": 8,
    "gpt2_1.5b": 8,
    "smollm2_135m": 1,
    "smollm2_1.7b": 8,
    "smollm3_3b": 32,
    "zero_7.5b": 64,
    "llama2_70b_64": 64,
    "llama2_70b": 2048,
    "llama3_70b": 64,
    "llama3_8b_long": 8,
    "qwen3_30b_a3b": 32,
    "gpt3_175b": 4096,
    "mt_nlg_530b": 4480,
}
"""The file of ds_configs -> the world size that it is made for."""

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "architecture": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        "architecture": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "max_position_embeddings": 40960,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
"""Name of a preset with experts -> its shape."""


def tiny(*overrides: str, world_size: int = 1, **keys: Any) -> Training:
    """Return a tiny training of 16 samples a step, with these changes."""
    stated = parse_config(small(**{**patch(*overrides), **keys}))
    return _training(stated, "tiny", world_size)


def from_file(path: Path, *overrides: str, world_size: int) -> Training:
    """Return the training of a file."""
    stated = read_config(path, overrides)
    return _training(stated, path.stem, world_size)


def _training(stated: RunConfig, name: str, world_size: int) -> Training:
    run = resolve_run(stated, World(world_size, "the plan", "cuda"), name=name)
    return Training(stated=stated, run=run)


def tiny_file(folder: Path, *overrides: str) -> Path:
    """Write the tiny run to a file."""
    return write(folder / "tiny.json", small(**patch(*overrides)))


def a100s(gpus_per_node: int = 8, memory_bytes: int | None = None) -> Cluster:
    """Return a cluster of A100s with 80 GB, or with the stated bytes."""
    device = DEVICES["a100-80gb"]
    return Cluster(
        device=replace(device, memory_bytes=memory_bytes or device.memory_bytes),
        gpus_per_node=gpus_per_node,
        network_bandwidth=device.network_bandwidth,
    )
