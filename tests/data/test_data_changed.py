"""Data that changed under its name since a run began."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from guarded import guard_over, mse, sums
from guarded import trained as train

from resilient_train import Guard
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import DiskConfig

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def trained(run_dir: Path, steps: int, data: Any, **given: Any) -> Guard:
    """A whole program, which resumes if there is something to resume."""
    given |= {"run_dir": run_dir, "disk": DiskConfig(every=5), "resume": True, "steps": steps}
    with closing(guard_over(data, objective=mse, **given)) as guard:
        return train(guard)


def test_data_with_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    """In one line with code 2; the run's own data resumes it."""
    trained(tmp_path / "run", 40, sums())
    for rows in (400, 520):
        with pytest.raises(ConfigError, match=rf"changed since .*: it has {rows} rows, and had 512: ") as refused:
            trained(tmp_path / "run", 60, sums(rows))
        assert refused.value.exit_code == 2
        assert "\n" not in str(refused.value)
    assert trained(tmp_path / "run", 60, sums()).clock.step == 60
