"""Deterministic operations, and an honest word on those that have no such form."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch

_log = logging.getLogger("resilient_train")


def set_deterministic(wanted: bool) -> None:
    """Make torch choose deterministic operations; where it has none, the log says so when the operation is met."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA's first matrix product runs
        _tell_in_the_log()
    if torch.are_deterministic_algorithms_enabled() != wanted:  # the call imports torch's compiler: a second or more
        torch.use_deterministic_algorithms(wanted, warn_only=True)
    torch.backends.cudnn.deterministic = wanted
    if wanted:
        torch.backends.cudnn.benchmark = False


def _tell_in_the_log() -> None:
    if getattr(warnings.showwarning, "tells", False):
        return
    plain = warnings.showwarning
    told: set[str] = set()

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        text = str(message)
        if "deterministic" not in text:
            plain(message, *place, **more)
        elif (operation := text.split(" does not have")[0]) not in told:
            told.add(operation)
            _log.warning(
                "run.deterministic: torch has no deterministic form of %s here; results may differ in it", operation
            )

    show.tells = True  # type: ignore[attr-defined]
    warnings.showwarning = show
