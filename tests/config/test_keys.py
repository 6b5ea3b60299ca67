"""The names of keys. ``mistakes.txt`` lists unknown keys with the keys that were meant."""

from megaspeed.config.errors import dotted
from megaspeed.config.loading import keys_at
from tests.config.small import problems


def test_unknown_keys_are_reported_all_at_once() -> None:
    found = problems(aa=1, model={"bb": 1, "cc": 1}, optimizer={"params": {"dd": 1}})
    assert len(found) == 4


def test_the_keys_of_a_section_do_not_depend_on_where_it_stands_in_a_list() -> None:
    assert keys_at(("data", "train", 3)) == keys_at(("data", "train"))
    assert "weight" in keys_at(("data", "train"))
    assert {"model", "train_batch_size"} < set(keys_at(()))


def test_dotted_paths_read_as_users_write_them() -> None:
    assert dotted(("optimizer", "params", "betas", 1)) == "optimizer.params.betas[1]"
