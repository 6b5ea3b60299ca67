"""What rank 0 prints: warnings, a description of the run, lines of steps, a summary.

The line of a step ends with the time since the first step began and the time that is left.
"""

import json
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megaspeed.bar_or_lines import BarOrLines
from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.errors import shortened
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.files.json_values import json_value
from megaspeed.job.resume import MOST_CHANGES, Start
from megaspeed.job.run_folder import CONFIG, LOADS
from megaspeed.model.documents import attends_without_mask
from megaspeed.model.gpt import DTYPES
from megaspeed.model.parameters import parameters_in_words, training_flops_per_token
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment, usable_processors
from megaspeed.training.metrics import (
    LoadMetrics,
    Metrics,
    PartMetrics,
    Record,
    SampleMetrics,
    StepMetrics,
    ValidationMetrics,
    device_name,
    peak_flops_per_second,
)
from megaspeed.training.spikes import Divergence
from megaspeed.training.trainer import Observer, TrainingSummary
from megaspeed.units import counted, traffic_unit

SLOW = 1.5
"""A rank is reported as slow if it works this many times as long as the median rank."""

COLUMNS = 80
"""Lines that describe a run have at most this many columns."""


def print_line(console: Console, line: str | Text) -> None:
    """Print a line. The terminal wraps it. A string may have rich's markup."""
    console.print(line, highlight=False, soft_wrap=True)


def print_warning(console: Console, text: str) -> None:
    """Print a warning. Markup in its text is not interpreted."""
    print_line(console, f"[yellow]warning:[/yellow] {escape(text)}")


def print_folded(console: Console, text: str) -> None:
    """Print text in 80 columns. A longer word, such as a path, stays in one piece."""
    fold = textwrap.TextWrapper(COLUMNS, subsequent_indent="  ", break_long_words=False).fill
    print_line(console, Text(fold(text)))


def show_preparation(bar: BarOrLines, phase: str, done: int, total: int) -> None:
    """Show how many bytes of a phase of the preparation are done; ``total`` is 0 if not known."""
    unit = traffic_unit([total])
    bar.show(done, f"{phase}, {unit.of(done)} of {unit.named(total)}" if total else phase, total)


def banner(run: Run, device: torch.device, start: Start) -> Iterator[str]:
    """Yield lines that describe a run before it starts. ``megaspeed plan`` has the rest.

    3d: pp 2 x dp 2 x tp 2 = 8 ranks on cpu, ZeRO-3, fp32
    step: 32 samples of 128 tokens; each data rank takes 4 micro-batches of 4, 1f1b
    model: 1,082,112 parameters, 7.041 MFLOP a token
    attention: scaled_dot_product_attention, fused
    files: runs/3d
    """
    grid, batch, parallel = run.grid, run.batch, run.config.parallel
    yield (
        f"{run.name}: {grid} = {counted(grid.world_size, 'rank')} on {device_name(device)}, "
        f"ZeRO-{run.zero_stage}, {run.precision}"
        + (", sequence parallelism" if run.sequence_parallel else "")
    )
    yield (
        f"step: {batch.train_batch_size:,} samples of {run.config.data.sequence_length:,} tokens; "
        f"each data rank takes {counted(batch.gradient_accumulation_steps, 'micro-batch')} of "
        f"{batch.micro_batch_size:,}" + (f", {parallel.schedule}" if grid.pp > 1 else "")
    )
    if len(run.schedule.phases) > 1:
        rest = run.stretches(start.step, start.tokens)
        parts = [f"{each.batch:,} from step {each.step + 1:,}" for each in rest]
        yield f"samples a step: {', '.join(shortened(parts, MOST_CHANGES))}"
    if run.config.training.tokens is not None:
        yield f"length: {run.config.training.tokens:,} tokens, trained after step {run.steps:,}"
    flops = training_flops_per_token(run.config.model, run.config.data.sequence_length)
    peak = peak_flops_per_second(device, run.precision)
    yield (
        f"model: {parameters_in_words(run.config.model)}, {flops / 1e6:,.4g} MFLOP a token"
        + ("" if peak is None else f"; MFU of {peak / 1e12:,.1f} TFLOP/s a rank (dense)")
    )
    yield f"attention: {describe_attention(run, device)}"
    if parallel.activation_checkpointing != "none":
        yield f"activations: {parallel.recomputation_in_words}"
    services = "".join(f", {service}" for service in run.config.training.report_to)
    yield f"files: {run.run_dir}{services}"


def describe_attention(run: Run, device: torch.device) -> str:
    """Describe which attention kernel this run uses, and if it is not the fastest one, why."""
    model, data = run.config.model, run.config.data
    if model.attention_dropout > 0:
        return (
            f"written out, not fused, because model.attention_dropout is {model.attention_dropout} "
            "(a fused kernel would drop different elements at each layout)"
        )
    fused = "scaled_dot_product_attention, fused"
    if data.reset_at_documents:
        key = "data.reset_at_documents"
    elif model.sliding_window is not None and model.sliding_window < data.sequence_length:
        key = "model.sliding_window"
    else:
        return fused
    if attends_without_mask(model, device, DTYPES[run.precision]):
        return f"FlashAttention, without a mask for {key}"
    return f"{fused}, with a mask for {key} (so not FlashAttention)"


def launch_warnings(
    launch: LaunchEnvironment,
    run: Run,
    *,
    visible_gpus: int,
    has_bf16: bool,
    processors: int,
    threads: int,
    torchrun_restarts: int | None = None,
) -> Iterator[str]:
    """Yield warnings about a launch that works, but is slow or ignores a key, with remedies.

    ``visible_gpus`` is the number of GPUs that this process sees, and ``has_bf16`` whether they
    compute in bf16. ``processors`` is the number of processors of this machine, and ``threads`` the
    number of torch's threads in this process.
    ``torchrun_restarts`` is None without torchrun.
    """
    ranks, tp = launch.local_world_size, run.grid.tp
    if launch.source == "SLURM_*" and ranks > 1 and visible_gpus == 1:
        yield (
            f"{ranks} ranks run on this machine, but srun shows each of them only its own GPU (as "
            "--gpus-per-task=1 does), so NCCL may not use NVLink between them: replace it with "
            f"--gpus-per-node={ranks}"
        )
    if ranks < launch.world_size and ranks % tp != 0:
        yield (
            f"parallel.tensor is {tp}, but {ranks} ranks run on this machine, so tensor groups "
            "cross machines, and each block waits for them four times a micro-batch. Choose a "
            f"parallel.tensor that divides {ranks}, and let pp or dp cross; megaspeed plan "
            "predicts the traffic, and megaspeed doctor measures what each link carries"
        )
    yield from run.config.model.warnings()
    if has_bf16 and not {"bf16", "fp16"} & run.config.model_fields_set:
        yield (
            "the configuration states no precision, so the run trains in fp32, but this GPU "
            "computes in bf16 many times as fast (H100: 989 TFLOP/s, fp32 67) and with half the "
            "memory for activations: set bf16.enabled=true, or bf16.enabled=false if fp32 is meant"
        )
    restarts = run.config.training.restart
    if torchrun_restarts is not None and torchrun_restarts < restarts:
        yield (
            "training.restart has no effect under torchrun, which restarts ranks by itself: start "
            f"torchrun with --max-restarts {restarts}"
        )
    fair = processors // ranks
    if run.config.zero_optimization.offloads_optimizer and threads == 1 and fair > 1:
        yield (
            "the optimizer runs on the CPU (zero_optimization.offload_optimizer) with 1 thread a "
            f"rank, but this machine has {processors} processors for {ranks} ranks, so a step "
            f"takes longer than it must: export OMP_NUM_THREADS={fair} (torchrun sets it to 1)"
        )


def describe_corpus(corpus: PreparedCorpus, seconds: float) -> str:
    """Describe the documents, and the tokens and sequences of training and validation data."""
    train, validation = corpus.train, corpus.validation
    sources = len(train.components)
    mixed = f" mixed from {sources} sources" if sources > 1 else ""
    documents = "" if corpus.documents is None else f"{counted(corpus.documents, 'document')}; "
    line = (
        f"corpus: {documents}{train.tokens:,} training tokens in {corpus.training_sequences:,} "
        f"sequences{mixed}; "
    )
    if validation is None:
        line += "no validation"
    else:
        share = validation.tokens / (train.tokens + validation.tokens)
        line += (
            f"{validation.tokens:,} validation tokens in {corpus.validation_sequences:,} "
            f"sequences, {share:.1%} of all"
        )
    return f"{line}; ready in {seconds:.1f} s"


def describe_start(start: Start, run: Run) -> Iterator[str]:
    """Yield lines that state where the run starts, and which checkpoints were skipped."""
    for checkpoint, why in start.skipped:
        yield f"[yellow]skipped {escape(str(checkpoint))}:[/yellow] {escape(why)}"
    if start.is_end_of(run):
        key, length = run.config.length(run.steps).split(" ", 1)
        yield (
            f"nothing is left to train: {escape(str(start.checkpoint))} has step {start.step}, "
            f"and {key} is {length}. Raise {key} to train, or "
            "start at step 0 with --fresh and without --resume DIR."
        )
    elif start.checkpoint is not None:
        begins = "resuming" if start.step else "starting"
        yield f"{begins} from {escape(str(start.checkpoint))}"
        changes = [f"changed since: {escape(change)}" for change in start.changes]
        yield from (f"  {change}" for change in shortened(changes, MOST_CHANGES))
        if start.dropped is not None:
            state = "momentum starts" if run.muon is not None else "moments start"
            yield f"  dropped: {start.dropped}. Their {state} at zero."
        if start.rate_change is not None:
            yield f"[yellow]warning:[/yellow] {escape(start.rate_change)}"


def describe_spare_ranks(run: Run) -> str:
    """Describe which ranks are spare (not in the grid), and why."""
    first, world = run.grid.world_size, run.grid.world_size + run.spare_ranks
    named = ", ".join(map(str, range(first, world)[:8])) + (", ..." if run.spare_ranks > 8 else "")
    which = f"rank {named} is" if run.spare_ranks == 1 else f"ranks {named} are"
    return (
        f"{which} spare: with train_batch_size "
        f"{run.batch.train_batch_size}, {run.grid} = {first} is the largest layout of {world} ranks"
    )


def describe_step(metrics: StepMetrics) -> str:
    """Return the line of a step. It usually fits 80 columns. An unknown MFU is omitted."""
    norm, rate = metrics.grad_norm, metrics.tokens_per_second
    form = ".3f" if norm < 100 else ".0f" if norm < 1e6 else ".0e"
    line = (
        f"step {metrics.step:>6}  loss {metrics.loss:.4f}  lr {metrics.learning_rate:.2e}  "
        f"grad norm {norm:{form}}  "
        + (f"{rate:,.0f} tok/s" if rate < 1e6 else f"{rate / 1e6:,.1f}M tok/s")
    )
    if metrics.skipped:
        return f"{line}  SKIPPED"
    return line if metrics.mfu is None else f"{line}  MFU {metrics.mfu:.1%}"


def describe_resumed(begin: Progress, first: StepMetrics) -> str:
    """Return a line: the first loss after a resume, and the last before the save."""
    before = "not finite" if begin.loss is None else f"{begin.loss:.4f}"
    return (
        f"resumed at step {first.step}: loss {first.loss:.4f}; {before} when saved "
        f"(step {begin.step})"
    )


def describe_slow_rank(metrics: PartMetrics, grid: Grid) -> str:
    """Return a line, with markup: the rank that the others wait for."""
    return (
        f"[yellow]step {metrics.step:>6}  slowest: {grid.name_of(metrics.slowest_rank)} worked "
        f"{metrics.slowest_rank_seconds:.3g} s, median {metrics.median_rank_seconds:.3g} s[/yellow]"
    )


def crowding(device_type: str, ranks: int) -> float:
    """Return how many threads of this machine's ranks share a processor; 1 if each has its own."""
    threads = ranks * torch.get_num_threads()
    return max(1.0, threads / usable_processors()) if device_type == "cpu" else 1.0


def describe_save(report: SaveReport) -> str:
    """Return the line of a save, with markup. ``paused`` is how long training waited for it."""
    if report.error is not None:
        return f"[red]step {report.step:>6}  no checkpoint:[/red] {escape(report.error)}"
    deleted = ", ".join(path.name for path in report.deleted)
    return (
        f"step {report.step:>6}  checkpoint {report.size_bytes / 1e6:,.1f} MB in "
        f"{report.seconds:.1f} s, paused {report.stall_seconds:.1f} s"
        + (f"; deleted {deleted}" if deleted else "")
    )


@dataclass
class ConsoleObserver(Observer):
    """Writes every step to the records, and every ``log_interval``-th to the console.

    The first step of a start and skipped steps are printed, too.
    """

    run: Run
    console: Console
    records: Sequence[Record]
    parts_record: Record
    begin: Progress
    crowding: float
    check_folder: Callable[[], object]

    def __post_init__(self) -> None:
        self._start = self.console.get_time()
        # The first step also compiles, so the remaining time does not count it.
        self._first_step_seconds, self._first_tokens = 0.0, 0
        self._last_spike, self._batch = -1, 0
        self._divergence = Divergence()

    def step(self, metrics: StepMetrics) -> None:
        self._write(metrics)
        is_first = metrics.step == self.begin.step + 1
        if is_first:
            self._first_step_seconds = self.console.get_time() - self._start
            self._first_tokens = metrics.tokens
        if metrics.skipped or is_first or metrics.step % self.run.config.training.log_interval == 0:
            self._print(f"{describe_step(metrics)}  {self._times(metrics)}")
        if not is_first and metrics.train_batch_size != self._batch:
            self._print(f"step {metrics.step:>6}  {metrics.train_batch_size:,} samples a step")
        self._batch = metrics.train_batch_size
        if is_first and self.begin.step > 0:
            self._print(describe_resumed(self.begin, metrics))
        if metrics.spike is not None and metrics.step - 1 != self._last_spike:
            file = shlex.quote(str(self.run.run_dir / CONFIG))
            # Not the step: the run may have been resumed with another batch or sequence length.
            trained = metrics.tokens - self.begin.tokens
            end = self.begin.samples + trained // self.run.config.data.sequence_length
            samples = f"{end - metrics.train_batch_size}:{end}"
            self._print(
                f"[yellow]step {metrics.step:>6}  spike:[/yellow] loss {metrics.loss:.4f}, grad "
                f"norm {metrics.grad_norm:.3f}; one of them lies {metrics.spike:.1f} standard "
                "deviations above its mean. Samples of the step: "
                f"{escape(f'megaspeed show-batch --config {file} --samples {samples}')}"
            )
        self._last_spike = self._last_spike if metrics.spike is None else metrics.step
        if sentence := self._divergence.sentence_after(metrics.step, metrics.loss):
            print_warning(self.console, sentence)

    def compiled(self, seconds: float) -> None:
        self._print(f"compiled the blocks and the loss in {seconds:.1f} s, part of the first step")

    def parts(self, metrics: PartMetrics) -> None:
        """Record the parts, and print a line if one rank is much slower than the median rank.

        If ranks share processors, the system's turns make some of them slower.
        """
        self.parts_record(metrics)
        slower = metrics.slowest_rank_seconds / max(metrics.median_rank_seconds, 1e-9)
        if slower > SLOW * self.crowding:
            self._print(describe_slow_rank(metrics, self.run.grid))

    def loads(self, metrics: LoadMetrics) -> None:
        """Replace the file. If this fails, such as on a full disk, training continues."""
        self.check_folder()
        with suppress(OSError):
            (self.run.run_dir / LOADS).write_text(json.dumps(json_value(metrics)))

    def profiled(self, step: int, trace: str) -> None:
        self._print(f"step {step:>6}  profile: {escape(trace)}")

    def validation(self, metrics: ValidationMetrics) -> None:
        self._write(metrics)
        self._print(
            f"step {metrics.step:>6}  validation loss {metrics.validation_loss:.4f}  "
            f"perplexity {metrics.validation_perplexity:.2f}"
        )

    def sampled(self, metrics: SampleMetrics) -> None:
        self._write(metrics)
        for prompt, text in metrics.samples:
            line = f"step {metrics.step:>6}  sample {prompt!r}: {text!r}"
            # Not every terminal can show every character.
            shown = line.encode(self.console.encoding, "backslashreplace")
            self._print(escape(shown.decode(self.console.encoding)))

    def stopping(self, stopped_by: str, step: int) -> None:
        steps = self.run.steps
        self._print(f"step {step:>6}  stopped by {stopped_by} after {step} of {steps} steps")

    def saving(self) -> None:
        """Check the run folder, as before each record."""
        self.check_folder()

    def saved(self, report: SaveReport) -> None:
        self._print(describe_save(report))

    def _times(self, metrics: StepMetrics) -> str:
        """Return the time since training started, and what is left from the second step on."""
        elapsed = self.console.get_time() - self._start
        line, done = str(timedelta(seconds=int(elapsed))), metrics.tokens - self._first_tokens
        tokens_left = self.run.tokens_left(metrics.step, metrics.tokens)
        if done == 0 or tokens_left == 0:
            return line
        left = (elapsed - self._first_step_seconds) / done * tokens_left
        return f"{line}, {timedelta(seconds=int(left))} left"

    def _write(self, metrics: Metrics) -> None:
        self.check_folder()
        for record in self.records:
            record(metrics)

    def _print(self, line: str) -> None:
        print_line(self.console, line)


def summary_table(run: Run, summary: TrainingSummary, device_type: str) -> Table:
    """Return the final figures of the run."""
    last, validation = summary.last_step, summary.last_validation
    title = f"{escape(run.name)}: {last.step} steps"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("training loss (last step)", f"{last.loss:.4f}")
    if validation is not None:
        table.add_row("validation loss", f"{validation.validation_loss:.4f}")
    table.add_row("tokens", f"{last.tokens:,}")
    table.add_row("time", f"{summary.seconds:.1f} s")
    table.add_row("tokens/s", f"{summary.tokens / summary.seconds:,.0f}")
    table.add_row("skipped steps", str(summary.skipped_steps))
    peaks = ", ".join(f"{peak / 2**20:,.0f}" for peak in last.peak_memory_bytes)
    what = " (whole process)" if device_type == "cpu" else ""
    table.add_row("peak memory by pipeline stage", f"{peaks} MiB{what}")
    return table
