"""Every component has its share, in an order that is shuffled and the same everywhere."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megaspeed.data.mixture import Component, Mixing, Mixture
from megaspeed.data.sampler import TrainingOrder, ValidationOrder, shuffled
from tests.data.numbered_corpus import alone, numbered_mixture, write_numbered_tokens

S = 6
# Weights such as 0.7, 1e-4 (rarer than once in 1,024 samples) and 2047.
DECIMALS = st.one_of(
    st.integers(1, 3000), st.integers(1, 999).map(lambda n: n / 1000), st.sampled_from([1e-4, 0.7])
)
WEIGHTS = st.lists(DECIMALS, min_size=2, max_size=21)


def components_drawn(weights: list[float], samples: range, key: str = "key") -> list[int]:
    mixing = Mixing.of(weights, key)
    return [mixing.draw(sample)[0] for sample in samples]


@given(WEIGHTS, st.integers(1, 10**12))
def test_complete_blocks_have_every_share_to_within_one_sample(
    weights: list[float], blocks: int
) -> None:
    mixing = Mixing.of(weights, "key")
    samples = blocks * mixing.block
    counts = mixing.counts_in_blocks(blocks)
    assert sum(counts) == samples and min(counts) >= blocks, "at least one in each block"
    for count, weight in zip(counts, mixing.weights, strict=True):
        # |count - samples * weight / total| < 1, in integers
        total = sum(mixing.weights)
        assert abs(count * total - samples * weight) < total


@given(WEIGHTS, st.integers(1, 10**9), st.text(max_size=3))
def test_a_draw_is_the_number_of_earlier_samples_of_its_component(
    weights: list[float], block: int, key: str
) -> None:
    mixing = Mixing.of(weights, key)
    for start in (0, block * mixing.block - 150):
        seen = {component: 0 for component in range(len(weights) * (start == 0))}
        for sample in range(start, start + 300):
            component, draw = mixing.draw(sample)
            assert draw == seen.get(component, draw)
            seen[component] = draw + 1


def test_every_stretch_of_32_samples_has_about_every_share() -> None:
    drawn = components_drawn([0.5, 0.2, 0.3], range(4096))
    for start in range(0, 4096, 32):
        counts = [drawn[start : start + 32].count(component) for component in range(3)]
        assert all(
            abs(count - 32 * share) < 2
            for count, share in zip(counts, (0.5, 0.2, 0.3), strict=True)
        )


def test_data_ranks_do_not_each_have_a_component_of_their_own() -> None:
    drawn = components_drawn([1, 1], range(1000))  # at data degree 2 a rank has every other sample
    assert 200 < drawn[::2].count(0) < 300
    # And a step of 8 samples has 4 of each.
    assert {drawn[start : start + 8].count(0) for start in range(0, 1000, 8)} == {4}


def test_the_order_depends_on_the_key_and_on_the_block() -> None:
    first, again = (components_drawn([1, 1], range(2048)) for _ in range(2))
    assert first == again
    assert first != components_drawn([1, 1], range(2048), key="another")
    assert first[:1024] != first[1024:]


def test_the_order_is_the_same_on_every_platform() -> None:
    # Written down once: a change of any of these changes the data order of every mixture.
    drawn = components_drawn([0.5, 0.2, 0.3], range(24), key="5:mixture")
    assert "".join(map(str, drawn)) == "020101022002100220010210"
    assert Mixing.of([0.5, 0.2, 0.3], "5:mixture").draw(10**15) == (0, 500_000_000_000_000)


def test_weights_are_the_decimal_numbers_that_a_person_writes() -> None:
    assert Mixing.of([0.1, 0.2], "key").weights == (1, 2)
    assert Mixing.of([1e-05, 1], "key").weights == (1, 100_000)
    assert Mixing.of([0.1, 0.2], "key") == Mixing.of([1, 2], "key")


def test_a_mixture_draws_from_each_component_what_it_gives_alone(tmp_path: Path) -> None:
    corpus = numbered_mixture(tmp_path, S)
    order = TrainingOrder.of(corpus.train, corpus.seed, S)
    drawn: list[list[int]] = [[], [], []]
    for sample in range(300):
        place = order.place_of(sample)
        drawn[place.component].append(place.sequence)
    for component, sequences in zip(corpus.train.components, drawn, strict=True):
        own, key = component.sequences(S), f"{corpus.seed}:{component.fingerprint}"
        assert sequences == [shuffled(draw, own, key) for draw in range(len(sequences))]


def test_a_sequence_lies_within_one_file(tmp_path: Path) -> None:
    lengths = [S + 1, 1, 3 * S, 0 * S + 2, 5 * S + 3]  # 1, 0, 2, 0 and 5 sequences
    files = [
        write_numbered_tokens(tmp_path, tokens, f"f{number}")
        for number, tokens in enumerate(lengths)
    ]
    order = ValidationOrder.of(alone(*files), 5, S)
    assert order.sequences == 8
    places = [order.place_of(row) for row in range(8)]
    assert [place.file for place in places] == [0, 2, 2, 4, 4, 4, 4, 4]
    assert [place.first_token for place in places] == [0, 0, 6, 0, 6, 12, 18, 24]


def test_a_component_that_is_used_up_in_an_evaluation_restarts(tmp_path: Path) -> None:
    """If it did not, the smallest component would end the evaluation of all."""
    corpus = numbered_mixture(tmp_path, S)
    assert corpus.validation is not None
    order = ValidationOrder.of(corpus.validation, corpus.seed, S)
    held = [component.sequences(S) for component in corpus.validation.components]
    assert order.sequences == corpus.validation_sequences == sum(held)
    drawn = [order.place_of(row) for row in range(order.sequences)]
    for component, sequences in enumerate(held):
        own = [place.sequence for place in drawn if place.component == component]
        assert own == [draw % sequences for draw in range(len(own))]
    # 9 sequences have a share of a half.
    assert sum(place.component == 0 for place in drawn) > held[0] == 9


def test_fingerprints_differ_with_files_weights_and_their_order(tmp_path: Path) -> None:
    first, second = (write_numbered_tokens(tmp_path, 20, name) for name in ("first", "second"))

    def mixture(*components: tuple[tuple[str, ...], float]) -> str:
        files = {"first": first, "second": second}
        return Mixture(
            tuple(
                Component(tuple(files[name] for name in names), weight, "any name")
                for names, weight in components
            )
        ).fingerprint

    assert mixture((("first",), 1.0)) == mixture((("first",), 2.0)) == "first"
    kinds = [
        mixture((("first", "second"), 1.0)),
        mixture((("second", "first"), 1.0)),
        mixture((("first",), 1.0), (("second",), 1.0)),
        mixture((("first",), 1.0), (("second",), 2.0)),
        mixture((("second",), 1.0), (("first",), 1.0)),
    ]
    assert len(set(kinds)) == len(kinds)
    assert all(one != other for one, other in pairwise(kinds))
