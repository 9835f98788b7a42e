"""Which of the many settings of a run become parameters in a tracker: those that people compare runs by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_GROUPS = ("model", "data", "objective", "optimizer", "schedule", "recovery", "checks", "drill", "experiment")
_ALWAYS = (
    *("run.steps", "run.seed", "data.batch_size", "clip.max_norm"),
    *("accelerate.gradient_accumulation_steps", "accelerate.mixed_precision"),
)
_TARGETS = ("model._target_", "data.train._target_", "objective._target_", "optimizer._target_", "schedule._target_")
_NEVER = ("hydra.", "tracking.", "run.name", "run.dir", "run.resume")  # the place of a run and how it is shown
_PLUMBING = ("optimizer.fused", "optimizer.no_decay")
_MOST = 12  # settings of a model, an optimizer or a schedule; of a larger one only those that were given


def compared(settings: Mapping[str, Any], choices: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Choose from `settings`, the leaves of a configuration. What a command line or a sweep gave is always included."""
    chosen = {name: choices[name] for name in _GROUPS if choices.get(name) is not None}
    given = [word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides]
    found = {}
    for key, value in settings.items():
        node = key.partition(".")[0]
        is_given = not key.startswith(_NEVER) and any(f"{key}.".startswith(f"{one}.") for one in given if "." in one)
        if key in _TARGETS:
            is_shown = chosen.get(node) == "custom"  # else the option stands for it
        elif node in ("model", "optimizer", "schedule") and key not in _PLUMBING:
            is_shown = sum(one.startswith(f"{node}.") for one in settings) <= _MOST
        else:
            is_shown = key in _ALWAYS
        if is_given or is_shown:
            found[key] = value
    return chosen | dict(sorted(found.items()))
