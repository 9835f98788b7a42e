"""Hydra's side of the door: one command line in, one run (or a sweep of them), one exit code out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from resilient_train.config.compose import from_hydra
from resilient_train.config.explain import CONF, VERSION_BASE, explained
from resilient_train.ranks.world import launched_rank
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


def main() -> None:
    """Train as the command line says; never a traceback for what a person can put right."""
    sys.argv[1:] = _options_first(sys.argv[1:])
    sys.path.insert(0, "")  # `resilient-train` finds a user's modules where `python -m resilient_train` does
    global _wants_traceback
    _wants_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra hands its errors to us instead of printing them
    try:
        _job()
    except Exception as error:
        _exit_codes.append(_complain(error, sys.argv[1:]))
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


@hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")
def _job(raw: DictConfig) -> float | None:
    """One run, or one of a sweep: a job that fails does not keep the others from running."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        print(f"job {hydra_config.job.num} of the sweep: {' '.join(hydra_config.overrides.task)}", flush=True)
    try:
        ending = run(from_hydra(raw))
    except Exception as error:
        _exit_codes.append(_complain(error))
        return None
    _exit_codes.append(ending.exit_code)
    return ending.loss  # what a sweeper minimises


def _leave(code: int) -> None:
    """End the process. One that failed beside others ends at once: gloo's threads would abort it on its way out."""
    if code and "WORLD_SIZE" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        if launched_rank() > 0:
            time.sleep(_LAST_WORD_S)  # the launcher ends all as soon as one has ended, and rank 0 speaks for them
        os._exit(code)
    sys.exit(code)


def _complain(error: Exception, overrides: Sequence[str] = ()) -> int:
    """Say what is wrong: once, however many processes were launched."""
    if _wants_traceback:
        raise error
    told = explained(error, overrides)
    if launched_rank() == 0:
        print(f"error: {told}", file=sys.stderr)
    return told.exit_code
