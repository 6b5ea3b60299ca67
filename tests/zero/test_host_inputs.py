"""Inputs of recomputed blocks that wait in host memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.config.model import ModelConfig
from megaspeed.model.gpt import GPT
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero import host_inputs
from megaspeed.zero.host_inputs import HostInputs
from tests.model.tiny_gpt import gpt2, gradients, initialized, llama
from tests.paper_gpu.accelerator import paper_accelerator
from tests.support.rank_pool import RankPool

BLOCKS = 4
CONFIGS = [gpt2(num_hidden_layers=BLOCKS), llama(num_hidden_layers=BLOCKS, residual_dropout=0.1)]


class Watched(HostInputs):
    """Also notes the most inputs that it has held on the device."""

    most_on_device = 0

    def _pack(self, x: Tensor) -> Any:
        held = super()._pack(x)
        self._note()
        return held

    def _unpack(self, held: Any) -> Tensor:
        x = super()._unpack(held)
        self._note(unpacked=1)
        return x

    def _note(self, unpacked: int = 0) -> None:
        here = sum(held.on_device is not None for held in self._held) + unpacked
        here += self._leaving is not None
        self.most_on_device = max(self.most_on_device, here)


def _trained(
    launch: LaunchEnvironment, config: ModelConfig
) -> tuple[list[Tensor], list[Tensor], int, int]:
    """Return the gradients of two micro-batches with and without host memory, the most inputs on
    the device, and the number of buffers in host memory.
    """
    with paper_accelerator():
        found = []
        inputs = Watched()
        for offloads in (False, True):
            model: GPT = initialized(config, recomputation="full_offloaded").train()
            if offloads:
                model.inputs_in_host_memory = inputs.hooks
            # As in a pipeline, all forwards come first.
            losses = [
                model(torch.arange(36).view(3, 12) + m, torch.arange(3)).square().mean()
                for m in range(2)
            ]
            for loss in losses:
                loss.backward()
            found.append(list(gradients(model).values()))
        return found[0], found[1], inputs.most_on_device, len(inputs._buffers)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.architecture)
def test_gradients_are_the_same_bits_and_two_inputs_are_on_the_device(
    pool: RankPool, config: ModelConfig
) -> None:
    ((expected, found, most, buffers),) = pool.run(1, _trained, config)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert most == 2
    assert buffers == 2 * BLOCKS, "each is free again after its backward"


def test_a_step_uses_the_buffers_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(host_inputs, "_SLAB_BYTES", 16)
    with paper_accelerator() as accelerator:

        def counted(buffer: Tensor) -> Tensor:
            pinned.append(buffer.nbytes)
            return buffer

        monkeypatch.setattr(accelerator, "pin_memory", counted)
        inputs = HostInputs()
        for _ in range(3):
            held = [inputs._pack(torch.full((2, 3), float(n))) for n in range(BLOCKS)]
            values = [inputs._unpack(each) for each in reversed(held)]
            assert [x.unique().tolist() for x in values] == [[3.0], [2.0], [1.0], [0.0]]
            assert all(x.shape == (2, 3) for x in values)
    assert pinned == [16, 8] * BLOCKS, "parts of 4 and of 2 numbers"
