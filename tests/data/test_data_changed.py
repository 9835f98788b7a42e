"""Data that changed under its name since a run began."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import guard_over, mse, sums
from guarded import trained as train

from resilient_train import Guard
from resilient_train.extensions.quarantine import RowsLeftOut
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import DiskConfig

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def trained(run_dir: Path, steps: int, data: Any, **given: Any) -> Guard:
    """A whole program, which resumes if there is something to resume."""
    given |= {"run_dir": run_dir, "disk": DiskConfig(every=5), "resume": True, "steps": steps}
    with closing(guard_over(data, objective=mse, **given)) as guard:
        return train(guard)


def test_data_that_changed_is_refused_or_accepted(tmp_path: Path) -> None:
    """In one line with code 2, which says how it is accepted; then the run resumes, and later as always."""
    bad = (7, 450)
    trained(tmp_path / "run", 40, sums(bad=bad))
    others = {"it has 400 rows, and had 512": sums(400), "it has 520 rows, and had 512": sums(520)}
    others[r"row \d+ is not what it was"] = sums(seed=4)
    for number, (how, other) in enumerate(others.items(), start=1):
        with pytest.raises(ConfigError, match=rf"changed since .*: {how}: .*data_changed=accept") as refused:
            trained(tmp_path / "run", 60, other)
        assert refused.value.exit_code == 2
        assert "\n" not in str(refused.value)
        shutil.copytree(tmp_path / "run", tmp_path / f"{number}")  # each resumes from the same state
        assert trained(tmp_path / f"{number}", 50, other, data_changed="accept").clock.step == 50
        again = trained(tmp_path / f"{number}", 60, other)
        assert again.clock.step == 60
        assert set(again._controls.extension(RowsLeftOut).rows) <= set(bad)


def test_the_same_data_is_never_refused(tmp_path: Path) -> None:
    """Nor are rows that are another each time they are fetched: they tell nothing."""

    class Noisy:
        def __init__(self) -> None:
            self.numbers = random.Random()

        def __len__(self) -> int:
            return 512

        def __getitem__(self, row: int) -> Any:
            x = torch.full((6,), self.numbers.random())
            return x, x.sum().reshape(1)

    for steps in (20, 40):
        assert trained(tmp_path / "same", steps, sums()).clock.step == steps
        assert trained(tmp_path / "noisy", steps, Noisy()).clock.step == steps
