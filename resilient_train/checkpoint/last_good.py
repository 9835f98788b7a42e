"""The newest proven state, written when a run has to end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from resilient_train.checkpoint import weights
from resilient_train.checkpoint.tree_files import save_tree

CHECKPOINTS = "checkpoints"


def save(run_dir: Path, step: int, model: nn.Module, parts: Mapping[str, Any]) -> Path:
    """Write a state beside the weights of `model`, which are the same ones for other programs to load."""
    path = run_dir / CHECKPOINTS / f"step-{step:08}"
    temporary = path.with_name(f".{path.name}.resilient-tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights.save(model, temporary / weights.WEIGHTS)
    save_tree(temporary, dict(parts))
    if path.exists():  # of an earlier end of this run: kept until the new one is in its place
        old = path.with_name(f".{path.name}.old.resilient-tmp")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old)
    else:
        temporary.rename(path)
    return path
