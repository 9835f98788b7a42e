"""Hydra's side of the door: one command line in, one run (or a sweep of them), one exit code out."""

from __future__ import annotations

import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from resilient_train.app.config import manual
from resilient_train.app.config.explain import VERSION_BASE, explained, typed
from resilient_train.app.config.meanings import meanings
from resilient_train.app.config.options import is_option, options_first, refuse_unknown
from resilient_train.app.config.sources import CONF, look_first
from resilient_train.app.page import Page
from resilient_train.app.streams import outlived
from resilient_train.errors import ConfigError, Stopped, TrainError, unusable
from resilient_train.files import commit_text, read_plain
from resilient_train.ranks.launch import launched_rank
from resilient_train.ranks.process_exit import code_for_agent
from resilient_train.record.endings import note_refusal
from resilient_train.secrets import learn, masked, masked_override, masked_tree, masked_yaml

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
    given = sys.argv[1:]
    words = sys.argv[1:] = options_first(given)
    sys.path.insert(0, "")  # `resilient-train` finds a user's modules where `python -m resilient_train` does
    global _wants_traceback, _main_process
    _main_process = os.getpid()
    _wants_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra hands its errors to us instead of printing them
    look_first()
    learn(dict(word.partition("=")[::2] for word in words))
    with outlived():
        try:
            _answer(words, given)
        except Exception as error:
            _exit_codes.append(_complain(error, words))
        except Stopped as error:  # before there was a run
            _exit_codes.append(error.exit_code)
        except KeyboardInterrupt:  # the run has said what there is to say; nor are the jobs left in a sweep wanted
            _exit_codes.append(1)
    _leave(max(_exit_codes, default=0))


def _answer(words: Sequence[str], given: Sequence[str]) -> None:
    """Train, or answer the question that the command line asks; `given` are its words in the order of a person."""
    refuse_unknown(given)
    if any(is_option(word, "--help") for word in words):
        manual.show(words, Page())
    elif any(is_option(word, "--shell-completion") for word in words):
        _complete(words)
    elif any(is_option(word, "--cfg") or is_option(word, "--info") for word in words):
        print(masked_yaml(_printed(_job)), end="")
    else:
        _refuse_sweep_of_a_group(words)
        _job()


def _complete(words: Sequence[str]) -> None:
    """Let Hydra's completion answer the shell; where the line cannot be completed, nothing is said into it."""
    if not any(word.startswith("query=") for word in words):
        print(_printed(_job), end="")
        return
    line = os.environ.get("COMP_LINE", "")
    typed = options_first(line.split()[1:])
    # Hydra takes a path with "python" in it for Python, and knows of a folder only what it is told itself.
    os.environ["COMP_LINE"] = " ".join(["resilient-train", *typed]) + (" " if line.endswith(" ") else "")
    folders = [
        (word, value) for word, value in pairwise(typed) if word in ("--config-dir", "-cd") and Path(value).is_dir()
    ]
    sys.argv[1:] = [*(word for pair in folders[-1:] for word in pair), *words]
    with suppress(Exception), redirect_stderr(io.StringIO()):
        found = _printed(_job)
        if "query=fish" in words:  # the only shell that shows what a word means
            known = meanings()
            found = "".join(f"{word}\t{known[word]}\n" if word in known else f"{word}\n" for word in found.splitlines())
        print(found, end="")


def _printed(task: Callable[[], object]) -> str:
    """What a question of Hydra's is answered with."""
    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        task()
    return said.getvalue()


def _refuse_sweep_of_a_group(words: Sequence[str]) -> None:
    """The processes of a launcher make one run together: they joined once, and end once."""
    flags = [word for word in words if is_option(word, "--multirun")]
    modes = [word for word in words if word.replace(" ", "").upper() == "HYDRA.MODE=MULTIRUN"]
    if "WORLD_SIZE" in os.environ and (asked := flags + modes):
        why = "a launcher's processes make one run; start the sweep without it, or every run by a command of its own"
        raise unusable(asked[0], why)


@hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")
def _job(raw: DictConfig) -> float | None:
    """One run, or one of a sweep: a job that fails does not keep the others from running."""
    hydra_config = HydraConfig.get()
    given = typed(hydra_config.overrides.task)
    if hydra_config.mode == RunMode.MULTIRUN:
        words = [re.sub(r"\\(.)", r"\1", word) for word in given]  # Hydra has quoted them
        told = " ".join(map(masked_override, words))
        print(f"job {hydra_config.job.num} of the sweep: {told}", flush=True)
        _hide_secrets_in(Path(hydra_config.sweep.dir) / "multirun.yaml")
    try:
        # Here, for they bring torch along, which takes seconds: help, completion and most mistakes do without.
        from resilient_train.app.config.compose import from_hydra
        from resilient_train.app.run import run

        ending = run(from_hydra(raw))
        code, loss = ending.exit_code, ending.loss
    except Exception as error:
        code, loss = _complain(error, given), None
    _exit_codes.append(code)
    if code and os.getpid() != _main_process:
        raise _JobEnded(f"job {hydra_config.job.num}", code)
    if code == Stopped.exit_code and hydra_config.mode == RunMode.MULTIRUN:
        raise Stopped("the jobs left in a sweep are not wanted either")
    return loss  # what a sweeper minimises


def _hide_secrets_in(file: Path) -> None:
    """Hydra writes down a sweep as it was given."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        tree = yaml.safe_load(read_plain(file).decode("utf-8"))
        if (hidden := masked_tree(tree)) != tree:
            commit_text(file, yaml.safe_dump(hidden, sort_keys=False))


def _leave(code: int) -> None:
    """End the process. One that failed beside others ends at once: gloo's threads would abort it on its way out."""
    seen = code_for_agent(code)
    if code and "WORLD_SIZE" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        if launched_rank() > 0:
            time.sleep(_LAST_WORD_S)  # the launcher ends all as soon as one has ended, and rank 0 speaks for them
        os._exit(seen)
    sys.exit(seen)


def _complain(error: Exception, overrides: Sequence[str] = ()) -> int:
    """Say what is wrong: once, however many processes were launched."""
    told = explained(error, overrides)
    if _wants_traceback:  # not from Hydra, which would print the overrides with their secrets
        print(masked("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        return told.exit_code
    if launched_rank() == 0:
        print(f"error: {masked(str(told))}", file=sys.stderr)
        directory = _directory_of(told, overrides)
        if told.exit_code == 2 and directory is not None and "WORLD_SIZE" in os.environ:
            note_refusal(directory, told.exit_code, str(told))  # a launcher makes another code of it
    return told.exit_code


def _directory_of(error: TrainError, overrides: Sequence[str]) -> Path | None:
    """The run directory that was meant, as far as it is known where a configuration is wrong."""
    if isinstance(error, ConfigError) and error.key == "run.dir":
        return Path(str(error.value))
    said = dict(word.partition("=")[::2] for word in overrides)
    name = said.get("run.name")
    return Path(said["run.dir"]) if "run.dir" in said else Path("runs", name) if name else None
