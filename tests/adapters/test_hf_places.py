"""Where a guarded Trainer of transformers is in its counts when what a rewind undid is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import hf_programs as programs
from test_hf import incidents, weights
from transformers import Trainer

import resilient_train


class Counted(programs.Struck):
    """A trainer whose loss depends on where the run is."""

    def compute_loss(self, *given: Any, **more: Any) -> torch.Tensor:
        loss: torch.Tensor = Trainer.compute_loss(self, *given, **more)
        loss *= 1 + 0.01 * self.state.global_step + self.state.epoch
        return loss


def test_what_a_rewind_undoes_is_repeated_with_the_counts_of_its_time(tmp_path: Path) -> None:
    def trained(fault: str) -> Any:
        trainer = programs.trainer("vit", tmp_path / fault, fault, steps=40)
        trainer.__class__ = Counted
        resilient_train.hf.guard(trainer).train()
        return trainer

    struck = trained("bit_flip")
    [incident] = incidents(tmp_path / "bit_flip")
    assert incident["steps_lost"] > 5
    assert weights(struck) == weights(trained(""))
    assert struck.state.global_step == 40
