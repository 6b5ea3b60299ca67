"""What is drawn follows the probabilities, and is the same for the same seed, prompt and number."""

from collections import Counter

import pytest
import torch

from megaspeed.inference.sampling import Sampling

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])
DRAWS = 4000


def shares(sampling: Sampling) -> list[float]:
    """How often each id is drawn."""
    generator = sampling.generator("a prompt", 1)
    drawn = Counter(sampling.choose(LOGITS, generator) for _ in range(DRAWS))
    return [drawn[token] / DRAWS for token in range(len(LOGITS))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 2, 4, 99])
def test_ids_are_drawn_as_often_as_they_are_likely(temperature: float, top_k: int) -> None:
    likely = LOGITS if top_k != 2 else LOGITS.where(LOGITS >= 2, -torch.inf)
    expected = (likely / temperature).softmax(dim=0).tolist()
    assert shares(Sampling(temperature=temperature, top_k=top_k)) == pytest.approx(
        expected, abs=0.03
    )


@pytest.mark.parametrize("temperature", [0.0, 1e-300])
def test_at_no_temperature_the_likeliest_is_taken(temperature: float) -> None:
    assert shares(Sampling(temperature=temperature, top_k=0)) == [0, 1, 0, 0]


def test_the_random_numbers_are_a_function_of_seed_prompt_and_number() -> None:
    def first(seed: int, prompt: str, number: int) -> float:
        generator = Sampling(seed=seed).generator(prompt, number)
        return float(torch.rand((), generator=generator))

    assert first(0, "a", 1) == first(0, "a", 1)
    assert len({first(0, "a", 1), first(1, "a", 1), first(0, "b", 1), first(0, "a", 2)}) == 4
