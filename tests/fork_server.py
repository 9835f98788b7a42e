"""Real processes without the seconds that a start takes: a server imports everything once, and forks them.

Each has an id, a parent and an exit code of its own, and can be struck by any signal. From its fork on it does what a
`python` that has just been started does; what comes before that, only tests with a true command line see.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
_OTHERS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
_ROOMS = [str(folder) for folder in HERE.iterdir() if folder.is_dir()]
# This checkout, whatever is installed.
OURS = os.pathsep.join([str(HERE), *_ROOMS, str(HERE.parent), *filter(None, _OTHERS)])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": OURS}

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_IS_CALLED = 15  # PR_SET_NAME

_polling = threading.Lock()  # a start polls every process, and an exit code can be read only once
_context = get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._inductor", "torch.distributed.fsdp", "torch.distributed.run", "frozen"]
    + [
        f"resilient_train.{name}"
        for name in ("command.run", "command.command", "zoo.data", "zoo.models", "zoo.objectives")
    ]
)


class Forked:
    """A process that calls one function, and then ends. Its exit code is as a shell has it, but -9 for SIGKILL."""

    def __init__(
        self,
        what: Callable[..., Any],
        *args: Any,
        place: Path | None = None,
        out: Path | None = None,
        errors: Path | None = None,
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        """Call it in `place`; what it says is added to `out`, and its errors to `errors` or there as well."""
        self._out = out
        self._process = _context.Process(
            target=_in_child, args=(what, args, place, out, errors or out, dict(environment)), daemon=True
        )
        with _polling:
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        """What it has said so far, on both streams if its errors go there as well."""
        return "" if self._out is None else self._out.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        return self.ended()

    def ended(self, seconds: float = 0.0) -> int | None:
        """Wait so long at most; the exit code, if there is one by then."""
        connection.wait([self._process.sentinel], seconds)
        with _polling:
            return self._process.exitcode

    def wait(self, seconds: float = 240.0) -> int:
        """The exit code. A process that takes longer is killed, and that is an error."""
        if (code := self.ended(seconds)) is None:
            self.kill()
            raise TimeoutError(f"still there after {seconds:.0f} s:\n{self.output[-3000:]}")
        return code

    def until(self, holds: Callable[[], bool], look_s: float = 0.002) -> bool:
        """Wait until something holds; False if the process has ended before."""
        deadline, looks = time.monotonic() + 240.0, 0
        while not holds():
            looks += 1
            if looks % 32 == 0 and self.ended() is not None:
                return holds()
            if time.monotonic() > deadline:
                self.wait(0.0)
            time.sleep(look_s)
        return True

    def strike(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        if self.ended() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.strike(signal.SIGKILL)
        self.ended(240.0)


def _in_child(
    what: Callable[..., Any],
    args: Sequence[Any],
    place: Path | None,
    out: Path | None,
    errors: Path | None,
    environment: Mapping[str, str],
) -> None:
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    os.setsid()  # a group of its own, as a shell gives to a command
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers,
    multiprocessing.set_start_method(None, force=True)  # which start as they do everywhere
    os.environ.clear()
    os.environ.update(environment)
    if place is not None:
        os.chdir(place)
    if out is not None and errors is not None:
        _redirect(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in ((1, out), (2, errors)):
            _redirect(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), number)
    _end_with(partial(what, *args))


def _redirect(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def _end_with(what: Callable[[], Any]) -> NoReturn:
    """Do the last thing of this process, and end as an interpreter ends."""
    code: Any = 0
    try:
        what()
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.last_value = error  # as an interpreter does
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        code = 0 if code is None else print(code, file=sys.stderr) or 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def python(*words: str) -> None:
    """Do what `python WORDS` does: `-m MODULE ...` or `FILE ...`."""
    import paused_run

    paused_run.install()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if words[0] == "-m":
        sys.argv, sys.path[:0] = list(words[1:]), [os.getcwd()]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = list(words), [str(Path(words[0]).parent)]
        runpy.run_path(words[0], run_name="__main__")


# ----------------------------------------------------------------------------------------------------- an elastic agent


def torchrun(mark: str, *words: str) -> None:
    """Be torch's elastic agent, whose processes are forked from it; their names in /proc are `mark` and their rank."""
    import torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    vars(torch.multiprocessing)["_set_thread_name"] = lambda name: None  # some would get other names
    _be_called(mark)

    def forked(args: Sequence[str], env: Mapping[str, str], **streams: Any) -> _Worker:
        return _Worker(f"{mark}.{env['RANK']}", args[args.index("-u") + 1 :], env, **streams)

    vars(subprocess_handler)["Popen"] = forked
    patience_s = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    api.PContext.close.__defaults__ = (None, patience_s)  # also where a process failed, which torch forgets
    run.main(list(words))


class _Worker:
    """A process of the agent, with as much of a Popen as it asks for."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        start_new_session: bool,
        **streams: Any,
    ) -> None:
        assert not any(streams.values())
        self.name = name
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._begin(words, environment)

    def _begin(self, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
        os.setsid()
        _be_called(self.name)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent's own
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        os.environ.clear()
        os.environ.update(environment)
        _end_with(partial(python, *words))

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.name, timeout)
            time.sleep(0.02)
        return code


def _be_called(name: str) -> None:
    ctypes.CDLL(None).prctl(_IS_CALLED, name.encode())
