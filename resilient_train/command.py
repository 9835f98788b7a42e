"""Hydra's side of the door: one command line in, one run (or a sweep of them), one exit code out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from resilient_train.config.compose import from_hydra
from resilient_train.config.explain import CONF, VERSION_BASE, explained
from resilient_train.errors import ConfigError, Stopped, TrainError, unusable
from resilient_train.ranks.leaving import as_seen_by_agent
from resilient_train.ranks.world import launched_rank
from resilient_train.record.endings import refused
from resilient_train.session import run

_WITH_A_VALUE = (
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
    "--cfg",
    "-c",
    "--package",
    "-p",
)

_LAST_WORD_S = 2.0
_wants_traceback = False
_exit_codes: list[int] = []  # of the jobs of this process; Hydra has no way to hand them on
_main_process: int | None = None  # that the command was given to; a launcher of Hydra's may run jobs in others


class _JobEnded(TrainError):
    """A job of a sweep did not end well in a process of its own: what Hydra carries back of that is an exception."""

    def __init__(self, job: str, code: int) -> None:
        super().__init__(job, code)  # what pickle makes it anew from
        self.job, self.exit_code = job, code

    def __str__(self) -> str:
        return f"{self.job} of the sweep ended with {self.exit_code}: its own output says why"


def main() -> None:
    """Train as the command line says; never a traceback for what a person can put right."""
    sys.argv[1:] = _options_first(sys.argv[1:])
    sys.path.insert(0, "")  # `resilient-train` finds a user's modules where `python -m resilient_train` does
    global _wants_traceback, _main_process
    _main_process = os.getpid()
    _wants_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra hands its errors to us instead of printing them
    try:
        _refuse_sweep_of_a_group(sys.argv[1:])
        _job()
    except Exception as error:
        _exit_codes.append(_complain(error, sys.argv[1:]))
    except Stopped as error:  # before there was a run
        _exit_codes.append(error.exit_code)
    except KeyboardInterrupt:  # the run has said what there is to say; the jobs left in a sweep are not wanted either
        _exit_codes.append(1)
    _leave(max(_exit_codes, default=0))


def _options_first(words: Sequence[str]) -> list[str]:
    """Put Hydra's options before the overrides: its parser takes no override behind one that has a value."""
    options: list[str] = []
    overrides: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        (options if word.startswith("-") else overrides).append(word)
        if word in _WITH_A_VALUE and left:
            options.append(left.pop(0))
    return options + overrides


def _refuse_sweep_of_a_group(words: Sequence[str]) -> None:
    """The processes of a launcher make one run together: they joined once, and end once."""
    flags = [word for word in words if word == "-m" or (word.startswith("--m") and "--multirun".startswith(word))]
    modes = [word for word in words if word.replace(" ", "").upper() == "HYDRA.MODE=MULTIRUN"]
    if "WORLD_SIZE" in os.environ and (asked := flags + modes):
        why = "a launcher's processes make one run; start the sweep without it, or every run by a command of its own"
        raise unusable(asked[0], why)


@hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")
def _job(raw: DictConfig) -> float | None:
    """One run, or one of a sweep: a job that fails does not keep the others from running."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        print(f"job {hydra_config.job.num} of the sweep: {' '.join(hydra_config.overrides.task)}", flush=True)
    try:
        ending = run(from_hydra(raw))
        code, loss = ending.exit_code, ending.loss
    except Exception as error:
        code, loss = _complain(error, hydra_config.overrides.task), None
    _exit_codes.append(code)
    if code and os.getpid() != _main_process:
        raise _JobEnded(f"job {hydra_config.job.num}", code)
    if code == Stopped.exit_code and hydra_config.mode == RunMode.MULTIRUN:
        raise Stopped("the jobs left in a sweep are not wanted either")
    return loss  # what a sweeper minimises


def _leave(code: int) -> None:
    """End the process. One that failed beside others ends at once: gloo's threads would abort it on its way out."""
    seen = as_seen_by_agent(code)
    if code and "WORLD_SIZE" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        if launched_rank() > 0:
            time.sleep(_LAST_WORD_S)  # the launcher ends all as soon as one has ended, and rank 0 speaks for them
        os._exit(seen)
    sys.exit(seen)


def _complain(error: Exception, overrides: Sequence[str] = ()) -> int:
    """Say what is wrong: once, however many processes were launched."""
    if _wants_traceback:
        raise error
    told = explained(error, overrides)
    if launched_rank() == 0:
        print(f"error: {told}", file=sys.stderr)
        directory = _directory_of(told, overrides)
        if told.exit_code == 2 and directory is not None and "WORLD_SIZE" in os.environ:
            refused(directory, told.exit_code, str(told))  # a launcher makes another code of it
    return told.exit_code


def _directory_of(error: TrainError, overrides: Sequence[str]) -> Path | None:
    """The run directory that was meant, as far as it is known where a configuration is wrong."""
    if isinstance(error, ConfigError) and error.key == "run.dir":
        return Path(str(error.value))
    said = dict(word.partition("=")[::2] for word in overrides)
    name = said.get("run.name")
    return Path(said["run.dir"]) if "run.dir" in said else Path("runs", name) if name else None
