"""``megaspeed report``: one page that a real browser shows without an error."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megaspeed.checkpoint.folders import METRICS
from megaspeed.cli import main
from megaspeed.job.run_folder import LOADS
from megaspeed.reports.run_page import Chart, Line, draw
from megaspeed.reports.run_record import read_run
from megaspeed.training.metrics import MetricsFile, MixtureMetrics, StepMetrics
from tests.reports.written_runs import loss_at, written_run
from tests.support.browser import open_page, photograph
from tests.training.metrics_of_steps import STEP_KEYS, step_metrics

pytestmark = pytest.mark.slow

EVIL = "<script>alert(1)<!--&$_{^\"'"


TEXTS = [
    EVIL,
    "",
    "\u05e9\u05dc\u05d5\u05dd \u202edesrever",
    "x" * 5000,
    "\x00\x1b[1m\r\x7f",
    "\ud800",
]
"""Prompts and continuations: a script, nothing, from right to left, a long line, control
characters, and half of a surrogate pair."""


def append(file: Path, *records: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write("".join(json.dumps(record) + "\n" for record in records))


def with_a_spike_at_50(step: int) -> StepMetrics:
    values: dict[str, Any] = {"tokens": 384 * step, "train_batch_size": 16 if step <= 20 else 32}
    if step == 50:
        spike = {"loss": 4.5, "spike": 7.25, "grad_norm": 1 / 3, "skipped": True}
        return step_metrics(step=step, **values, **spike)
    return step_metrics(step=step, **values, loss=loss_at(step))


def with_everything(run: Path) -> Path:
    """Add samples, a spike, a change of the batch, loads of experts and a profile to a run."""
    append(
        run / METRICS,
        *map(vars, map(with_a_spike_at_50, range(1, 61))),
        *(
            {"step": step, "samples": [[text, f"{text} at {step}"] for text in TEXTS]}
            for step in (20, 40, 60)
        ),
    )
    (run / LOADS).write_text(json.dumps({"step": 40, "loads": [[5, 3, 4, 4], [8, 0, 2, 6]]}))
    (run / "profile").mkdir()
    for steps in ("9-11", "10-12"):
        (run / f"profile/steps-{steps}.txt").write_text(f"{EVIL} {steps}\n" + "y" * 300)
    Image.new("RGB", (1500, 400), (0, 200, 100)).save(run / "profile/steps-10-12.png")
    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of two runs. One was resumed, and its name would be a script. One is in
    progress.
    """
    folder = tmp_path_factory.mktemp("report")
    runs = [
        with_everything(written_run(folder / EVIL, resumed_at=30)),
        written_run(
            folder / "second",
            steps=45,
            factor_from=(25, 1.05),
            optimizer={"type": "AdamW", "params": {"lr": 2e-3}},
        ),
    ]
    file = folder / "report.html"
    assert main(["report", *map(str, runs), "--output", str(file)]) == 0
    return file


def test_a_browser_opens_it_without_an_error_and_shows_the_final_loss(page: Path) -> None:
    opened = open_page(page)
    assert opened.console == []
    assert f"<td>{loss_at(60):.4f}</td>" in opened.dom
    assert opened.dom.count("<svg") == 5 + 1
    assert opened.dom.count("<img") == 1
    assert "<td>0</td><td>1 (0.75 x)</td><td>0 (1.25 x)</td>" in opened.dom, "loads of block 0"
    row = "<td>50</td><td>7.2</td><td>4.5000</td><td>0.3333</td><td>skipped</td>"
    assert opened.dom.count(row) == 1, "the spike"
    phases = ("<td>1</td><td>20</td><td>16</td><td>7,680</td>", "<td>21</td><td>60</td><td>32</td>")
    assert all(phase in opened.dom for phase in phases)
    assert "$_{^\"' 10-12\n" in opened.dom, "the last profile"
    prompts = re.findall(r"<strong [^>]*>(.*)</strong>", opened.dom)
    assert (
        prompts[1:3] == ["(empty prompt)", TEXTS[2]] and prompts[4] == "\u2400\u241b[1m\u240d\u2421"
    )
    assert [len(prompt) for prompt in prompts[3:]] == [500, 7, 1]
    steps = re.findall(r"<dt>step (\d+)</dt>", opened.dom)
    assert steps == ["60", "40", "20"] * len(TEXTS), "the newest first"


def test_no_text_of_a_run_becomes_markup_of_the_page(page: Path) -> None:
    opened = open_page(page)
    assert "<script" not in opened.dom
    assert "&lt;script&gt;alert(1)&lt;!--&amp;$_{^" in opened.dom


def test_the_policy_stops_a_script_and_the_console_would_show_an_error(
    page: Path, tmp_path: Path
) -> None:
    mutated = tmp_path / "mutated.html"
    script = "<script>document.body.append('it ' + 'ran')</script></body>"
    mutated.write_text(page.read_text().replace("</body>", script))
    opened = open_page(mutated)
    assert "it ran" not in opened.dom
    assert any("Content Security Policy" in line for line in opened.console)


def test_the_page_names_no_address_but_namespaces(page: Path) -> None:
    addresses = set(re.findall(r"\w+://[^\"'\s<>]+", page.read_text()))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def colours_of(picture: Image.Image) -> set[tuple[int, ...]]:
    counted = picture.getcolors(maxcolors=picture.width * picture.height)
    assert counted is not None
    return {colour for _, colour in counted}  # type: ignore[misc]


HEIGHT = 6000
"""More than the page has at any width."""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1200])
def test_it_can_be_read_on_a_phone_and_in_the_dark(
    page: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    picture = photograph(page, tmp_path / "page.png", width, HEIGHT, dark=dark)
    assert (0, 200, 100) in colours_of(picture), "the picture of the profile"
    assert picture.width == width
    corner = picture.getpixel((1, 1))
    assert isinstance(corner, tuple)
    assert (sum(corner) < 3 * 64) is dark, "the background"
    assert {(0x3B, 0x82, 0xF6), (0xF0, 0x78, 0x18)} <= colours_of(picture), "both runs are drawn"
    # Text and axes contrast with the background: dark on light, light on dark.
    shades = sorted(sum(colour) for colour in colours_of(picture))
    assert (shades[-1] > 3 * 200) if dark else (shades[0] < 3 * 60)
    assert abs(sum(corner) - (shades[0] if dark else shades[-1])) < 3 * 8, "no black on black"
    margin = picture.crop((width - 8, 0, width, HEIGHT))
    assert colours_of(margin) == {corner}, "nothing is wider than the window"


def test_it_shows_resumptions_progress_and_the_difference(page: Path) -> None:
    text = page.read_text()
    assert "A dashed line marks a step from which a run was resumed." in text
    assert "<tr><td>optimizer.params.lr</td><td>0.001</td><td>0.002</td></tr>" in text
    assert "<td>45 of 60</td>" in text


@pytest.mark.parametrize(("low", "high"), [(1.1, 1.9), (0.72, 7.9), (3, 40), (0.01, 500)])
def test_a_logarithmic_axis_has_at_least_two_labels(low: float, high: float) -> None:
    line = Line("grad_norm", "red", np.array([1000, 2000]), np.array([low, high]))
    svg = draw(Chart("Gradient norm", "", (), logarithmic=True), [line])
    labels = {float(label) for label in re.findall(r">([\d.e+-]+)</text>", svg)}
    assert sum(low / 2 <= label <= 2 * high for label in labels) >= 2, "those of steps are higher"


def test_a_legend_names_the_lines_of_one_run(tmp_path: Path) -> None:
    run, file = written_run(tmp_path / "run", steps=40), tmp_path / "report.html"
    assert main(["report", str(run), "--output", str(file)]) == 0
    drawn = set(re.findall(r"<text[^>]*>([a-z0-9_ ]+)</text>", file.read_text()))
    assert {"loss", "validation_loss", "stage 0", "stage 1"} <= drawn
    assert "dashed" not in file.read_text(), "the run was not resumed"


def test_a_run_with_experts_shows_a_map_of_their_loads(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=3)
    with MetricsFile(folder / METRICS) as file:
        values = vars(step_metrics(step=4))
        file.write(MixtureMetrics(**values, auxiliary_loss=4.5, load_factors=[1.25, 2.0]))
    (folder / LOADS).write_text(json.dumps({"step": 4, "loads": [[5, 3, 4, 4], [8, 0, 2, 6]]}))
    assert read_run(folder).curves["load_factor"].values.tolist() == [2.0]
    page = tmp_path / "report.html"
    assert main(["report", str(folder), "--output", str(page)]) == 0
    opened = open_page(page)
    assert opened.console == [], "the policy blocks images"
    assert "Loads of the experts, last timed step: run" in opened.dom
    assert opened.dom.count("<svg") == 5 + 2 + 1


@pytest.mark.parametrize(
    "broken",
    [
        *('{"step": 4, "loads": [[5, ', "[]", '{"loads": [[1], [2, 3]]}', '{"loads": []}'),
        *('{"loads": [1, 2]}', '{"loads": [[]]}', '{"loads": 5}', '{"loads": [[1e999, 1]]}'),
    ],
)
def test_loads_that_cannot_be_read_are_not_drawn(tmp_path: Path, broken: str) -> None:
    folder = written_run(tmp_path / "run", steps=3)
    (folder / LOADS).write_text(broken)
    assert read_run(folder).loads is None


def test_a_load_factor_that_is_no_number_is_not_drawn(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=3)
    with (folder / METRICS).open("a") as file:
        file.write('{"step": 4, "loss": 1.0, "load_factors": ["a", 1.5]}\n')
    assert np.isnan(read_run(folder).curves["load_factor"].values).all()


def test_a_run_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    new = written_run(tmp_path / "new", steps=0)
    assert main(["report", str(new), "--output", str(file)]) == 0
    assert "No step is recorded yet." in file.read_text()


def test_a_run_of_a_hundred_thousand_steps_makes_a_small_page(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    long = written_run(tmp_path / "long", steps=100_000)
    assert main(["report", str(long), "--output", str(file)]) == 0
    assert file.stat().st_size < 1_000_000


def test_a_page_does_not_grow_with_the_number_of_validations(tmp_path: Path) -> None:
    run, file = written_run(tmp_path / "run", steps=100), tmp_path / "report.html"
    steps = range(100, 100_001, 100)
    samples = [[f"prompt {number}", "word " * 300] for number in range(8)]
    append(run / METRICS, *({"step": step, "samples": samples} for step in steps))
    spikes = (step_metrics(step=step, spike=6 + step / 100) for step in range(1, 101))
    append(run / METRICS, *map(vars, spikes))
    (run / "profile").mkdir()
    (run / "profile/steps-1-2.txt").write_text("z" * 10**6)
    (run / "profile/steps-1-2.png").write_bytes(bytes(2**20 + 1))
    assert main(["report", str(run), "--output", str(file)]) == 0
    text = file.read_text()
    assert len(text) < 600_000
    newest = [f"{step:,}" for step in reversed(steps)][:20]
    assert re.findall("<dt>step (.*)</dt>", text) == [*newest, "100"] * 8
    listed = re.findall(r"<td>(\d+)</td><td>[\d.]+</td><td>3.2500</td>", text)
    assert listed == [str(step) for step in range(100, 80, -1)], "the largest first"
    assert f"is not on this page: {run}/profile/steps-1-2.png" in text and "<img" not in text


def test_a_batch_that_does_not_change_has_no_table(tmp_path: Path) -> None:
    run, file = written_run(tmp_path / "run", steps=3), tmp_path / "report.html"
    assert main(["report", str(run), "--output", str(file)]) == 0
    assert "Batch" not in file.read_text()
    later = step_metrics(step=5, tokens=2000, train_batch_size=9)
    append(run / METRICS, {"step": 4, "tokens": 1500}, vars(later))
    assert main(["report", str(run), "--output", str(file)]) == 0
    assert "<td>1</td><td>3</td><td>12</td><td>1,152</td>" in file.read_text()
    assert "<td>5</td><td>5</td><td>9</td><td>500</td>" in file.read_text(), "step 4 states none"


STRANGE = (None, True, -1, 0, 5, 1e99, -1e99, 1e308, 1e-320, 10**30, "<b>", [1e99, "x"], {"a": 1})
"""Values that a damaged or hostile file may have under any name."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strange", STRANGE, ids=str)
def test_strange_values_of_any_name_make_a_page(tmp_path: Path, strange: object) -> None:
    run, file = written_run(tmp_path / "run", steps=3), tmp_path / "report.html"
    names = [*STEP_KEYS[1:], "validation_loss", "time", "pp"]
    samples = ([strange], [[strange, "a"], ["a", strange], ["a"]], strange)
    records = [
        *({"step": 2, "samples": each} for each in samples),
        *({"step": step, **dict.fromkeys(names, strange)} for step in (2, 3)),
        {"step": strange, "loss": 1.0},
    ]
    (run / "profile/steps-1-2.txt").mkdir(parents=True)
    (run / "profile/steps-1-1.txt").write_bytes(b"\xff\x00 table")
    (run / "profile/steps-1-1.png").mkdir()
    for name in ("metrics.jsonl", "starts.jsonl"):
        with (run / name).open("a") as lines:
            lines.write("".join(json.dumps(record) + "\n" for record in records))
    (run / "config.json").write_text(json.dumps({"training": strange, "model": strange}))
    assert main(["report", str(run), "--output", str(file)]) == 0
    assert "<b>" not in file.read_text()


def test_the_length_of_a_run_is_in_the_unit_that_it_states(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", steps=45, training={"tokens": 60 * 384})
    file = tmp_path / "report.html"
    assert main(["report", str(run), "--output", str(file)]) == 0
    assert "<td>45</td>" in file.read_text() and "<td>17,280 of 23,040</td>" in file.read_text()


def test_a_folder_that_is_not_a_run_ends_with_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = written_run(tmp_path / "run", steps=2), tmp_path / "report.html"
    assert main(["report", str(run), str(tmp_path), "--output", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path} has no metrics.jsonl, so no run has started in it; name the folder of a run "
        "that has started (training.run_dir, by default runs/<config name>)\n"
    )
    assert not file.exists()
