"""The command line, answered with Hydra: one run (or a sweep of them), one exit code."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from resilient_train.command.config import CONF
from resilient_train.command.config.compose import VERSION_BASE, composed, explained, values_of
from resilient_train.command.terminal import survive_hangup
from resilient_train.durable.endings import note_refusal
from resilient_train.ground.errors import ConfigError, Stopped, TrainError, unusable
from resilient_train.ground.files import commit_text, read_yaml
from resilient_train.ground.reader import find_in_working_directory
from resilient_train.ground.secrets import masked, masked_tree
from resilient_train.processes.launch import launched_rank
from resilient_train.processes.process_exit import code_for_agent

_LAST_WORD_S = 2.0  # seconds that other ranks wait for rank 0's report

_codes: list[int] = []  # of the runs of this process: Hydra does not return them
_main_process: int | None = None  # a launcher of Hydra's may run jobs in other processes


def main() -> None:
    """Train as the command line says; for a mistake that a person can correct, print one line and no traceback."""
    words = sys.argv[1:]
    find_in_working_directory()
    global _main_process
    _main_process = os.getpid()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors instead of printing them
    _codes.clear()
    code = 0
    survive_hangup()
    try:
        overrides = get_args_parser().parse_intermixed_args(words).overrides  # Hydra takes them in one piece only
        sys.argv[1:] = [*(word for word in words if word not in overrides), *overrides]
        _job()
    except Exception as error:
        code = _complain(error, words)
    except Stopped as error:  # before there was a run
        code = error.exit_code
    except KeyboardInterrupt:  # the run has reported its end; the remaining jobs of a sweep are dropped
        code = 1
    worst = max([code, *_codes])
    if worst and "WORLD_SIZE" in os.environ:  # ends at once: gloo's threads would abort this process in a normal exit
        sys.stdout.flush()
        sys.stderr.flush()
        if launched_rank() > 0:
            time.sleep(_LAST_WORD_S)  # the launcher ends all as soon as one has ended, and rank 0 reports for them
        os._exit(code_for_agent(worst))
    sys.exit(code_for_agent(worst))


@hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")
def _job(raw: DictConfig) -> None:
    """Train one run, or one of a sweep: if it fails, the others still run."""
    hydra_config = HydraConfig.get()
    given: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)  # reading one may fail
    is_sweep = hydra_config.mode == RunMode.MULTIRUN
    if is_sweep and "WORLD_SIZE" in os.environ:
        why = "a launcher's processes make one run; start the sweep, or each of its runs, without the launcher"
        raise unusable("--multirun", why)
    if is_sweep:
        words = [re.sub(r"\\(.)", r"\1", word) for word in given]  # Hydra has quoted them
        print(masked(f"job {hydra_config.job.num} of the sweep: {' '.join(words)}"), flush=True)
        file = Path(hydra_config.sweep.dir) / "multirun.yaml"  # Hydra has written it with the secrets
        tree = read_yaml(file)
        if (hidden := masked_tree(tree)) != tree:
            with suppress(OSError):
                commit_text(file, yaml.safe_dump(hidden, sort_keys=False))
    try:
        sweep = Path(hydra_config.sweep.dir).name if is_sweep else None
        made = composed(raw, hydra_config.runtime.choices, given=given, sweep=sweep)
        # Here, as it imports torch, which takes seconds: help, completion and most mistakes need none.
        from resilient_train.command.run import run

        code = run(made)
    except Exception as error:
        code = _complain(error, given)
    _codes.append(code)
    if code and os.getpid() != _main_process:
        raise TrainError(f"job {hydra_config.job.num} of the sweep ended with {code}: its own output says why")
    if code == Stopped.exit_code and is_sweep:
        raise Stopped("a request to stop also ends the remaining jobs of a sweep")


def _complain(error: Exception, overrides: Sequence[str] = ()) -> int:
    """Print what is wrong, of a wrong configuration once on each host; return the exit code."""
    ended = explained(error, overrides)
    if (rank := launched_rank()) == 0 or not isinstance(ended, ConfigError) or os.environ.get("LOCAL_RANK") == "0":
        print(f"error{f' on rank {rank}' if rank else ''}: {masked(str(ended))}", file=sys.stderr)
    directory = values_of(overrides).get("run.dir")
    if isinstance(ended, ConfigError) and ended.key == "run.dir":
        directory = ended.value
    if rank == 0 and directory and ended.exit_code == 2 and "WORLD_SIZE" in os.environ:
        note_refusal(Path(directory), ended.exit_code, str(ended))  # the launcher hides the exit code
    return ended.exit_code
