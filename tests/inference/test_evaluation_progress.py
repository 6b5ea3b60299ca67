"""How far an evaluation has come, in lines where there is no terminal."""

import re
from pathlib import Path

import pytest

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.evaluation_progress import EvaluationProgress
from megaspeed.config.data import Source
from megaspeed.data.sources import list_files
from megaspeed.inference.perplexity import Score


def test_lines_tell_the_share_that_is_predicted_and_the_loss_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, size in {"a.txt": 30, "b.txt": 10}.items():
        (tmp_path / name).write_text("x" * size)
    progress = EvaluationProgress(list_files([Source(path=f"{tmp_path}/*.txt")], "INPUT"))
    assert progress.total_bytes == 40
    with BarOrLines(progress.total_bytes, seconds_between_lines=0) as bar:
        for _ in progress.pieces():
            progress.show(Score(nats=3.0, tokens=1_500, read_tokens=3_000), bar)
        progress.show(Score(nats=3.0, tokens=3_000, read_tokens=3_000), bar)
    first, second, last = capsys.readouterr().err.splitlines()
    assert first == " 38%  1,500 tokens, loss 0.0020"
    assert re.fullmatch(r" 50%  1,500 tokens, loss 0\.0020, \d:\d\d:\d\d left", second)
    assert last == "100%  3,000 tokens, loss 0.0010"


def test_where_the_whole_is_not_known_no_share_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with BarOrLines(0, seconds_between_lines=0) as bar:
        bar.show(7, "some text")
    assert capsys.readouterr().err == "some text\n"


def test_what_is_soon_done_has_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with BarOrLines(10) as bar:
        bar.show(10, "some text")
    assert capsys.readouterr() == ("", "")
