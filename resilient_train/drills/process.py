"""What goes wrong with the process itself, between two updates."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from resilient_train.drills.fault import StateFault


@dataclass(frozen=True, kw_only=True)
class Crash(StateFault):
    """The process is killed: no handler runs, nothing is flushed. The same command goes on."""

    name = "crash"

    def spoil(self, tick: int, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Hang(StateFault):
    """The process does nothing any more, as when a file system does not answer: see run.step_timeout."""

    name = "hang"

    def spoil(self, tick: int, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        while True:
            time.sleep(3600)
