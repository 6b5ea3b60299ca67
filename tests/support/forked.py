"""Python programs that start fast: forked from a process that has imported torch and megaspeed.

    rank = Forked(["scripts/pretrain.py", "--config", "tiny.json"], folder, environment, out, err)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(60) == 0

This runs ``python scripts/pretrain.py --config tiny.json`` in a session of its own, but saves the
seconds that its imports take. If there are several ranks, a launcher sets the variables of torchrun
for each. The launcher does only what every launcher does:

    launcher (forked)  ->  rank 0, 1, ... (forked by it)     one fails: the others get SIGTERM

Either rank 0 keeps the store, as under deepspeed, srun and mpirun, or the launcher keeps it, as
torchrun's agent does.

Tests of a real launcher and of its output start that launcher instead.
"""

import atexit
import contextlib
import ctypes
import io
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import psutil
import torch.distributed as dist

from tests.support.fork_server import start_fork_server, use_fork_server
from tests.support.launched import free_port
from tests.support.machine import limit

_SECONDS_TO_END = math.ceil(limit(15))

_started: list["Forked"] = []


class Forked:
    """A running program, with the methods of ``subprocess.Popen``.

    Args:
        arguments: the arguments of ``python``: a script or ``-m`` and a module, then its arguments.
        folder: the working directory.
        environment: all environment variables of the program.
        out, err: files for its standard output and standard error. They may be the same file.
        ranks: if more than one, a launcher starts the program this many times. The launcher ends
            with the exit code of the first rank that fails.
        keeps_store: whether that launcher keeps the store.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        folder: Path,
        environment: Mapping[str, str],
        out: Path,
        err: Path,
        ranks: int = 1,
        *,
        keeps_store: bool = False,
    ) -> None:
        self.args = list(map(str, arguments))
        server = start_fork_server()
        hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        given = (self.args, folder, dict(environment), out, err, ranks, keeps_store, hangup)
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(*given, server))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        _started.append(self)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. A timeout is multiplied by the factor of this machine."""
        seconds = None if timeout is None else limit(timeout)
        self._process.join(seconds)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, seconds or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that the launcher has started, in the order of ranks."""
        children = psutil.Process(self.pid).children()
        return sorted(children, key=lambda child: (child.create_time(), child.pid))

    def end_session(self) -> None:
        """Kill the program and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def run_forked(
    arguments: Sequence[str | Path], folder: Path, seconds: float = 240.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program without GPUs, as ``subprocess.run`` does. Its caches are in ``folder``.

    The program does not get the launcher variables of this process.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    variables = {"MEGASPEED_CACHE": str(folder / "cache"), **variables}
    out, err = folder / "stdout", folder / "stderr"
    for file in (out, err):
        file.unlink(missing_ok=True)
    process = Forked(arguments, folder, {**kept, **variables}, out, err)
    try:
        code = process.wait(seconds)
    finally:
        process.end_session()
    return subprocess.CompletedProcess(process.args, code, out.read_text(), err.read_text())


@atexit.register  # must run before multiprocessing waits for the processes
def _end_all() -> None:
    for one in _started:
        if one.returncode is None:
            one.end_session()


def _run(
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    out: Path,
    err: Path,
    ranks: int,
    keeps_store: bool,
    hangup_is_ignored: bool,
    server: str,
) -> None:
    os.setsid()
    use_fork_server(server)  # processes that the program forks start fast, too
    # The process that this one is forked from may have been started by ``nohup``, so set this here.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if hangup_is_ignored else signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in ((1, out), (2, err)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    # Modules may hold references to these streams. So keep the streams and redirect their
    # descriptors.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    if ranks == 1:
        _run_python(arguments)
    sys.exit(_launch(arguments, ranks, keeps_store))


def _show_command_line(words: Sequence[str]) -> None:
    """Change the command line that other processes see. Ranks recognize a launcher by it."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = map(int, fields[45:47])
    text = "".join(f"{word}\0" for word in words).encode()
    ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def _run_python(arguments: list[str]) -> None:
    """Do what the interpreter does with these arguments. This function does not return."""
    sys.orig_argv = [sys.executable, *arguments]
    _show_command_line(sys.orig_argv)
    main = ModuleType("__main__")
    # multiprocessing does the same. Its processes may send back objects under the second name.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    code = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            sys.argv = arguments
            script = Path(arguments[0])
            sys.path.insert(0, str(script.parent))
            main.__file__ = str(script)
            exec(compile(script.read_text(), script, "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _launch(arguments: list[str], ranks: int, keeps_store: bool) -> int:
    """Start the ranks. Return the exit code of the first rank that fails, or 0."""
    port = free_port()
    world: dict[str, object] = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if keeps_store:
        world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    left = set()
    for rank in range(ranks):
        number = os.fork()
        if number == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, **world}
            os.environ.update({name: str(value) for name, value in place.items()})
            _run_python(arguments)
        left.add(number)
    # The store starts after the ranks, because its threads must not be forked. Ranks wait for it.
    if keeps_store:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert store.port == port

    def send(number: int) -> None:
        for rank in left:
            os.kill(rank, number)

    signal.signal(signal.SIGTERM, lambda number, frame: send(number))
    signal.signal(signal.SIGALRM, lambda number, frame: send(signal.SIGKILL))
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal sends these to the ranks, too
        signal.signal(number, signal.SIG_IGN)
    first = 0
    while left:
        rank, status = os.wait()
        left.remove(rank)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code if code > 0 else 128 - code
            send(signal.SIGTERM)
            signal.alarm(_SECONDS_TO_END)
    return first
