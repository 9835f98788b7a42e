"""What a person compares runs by: a few of the hundred and more settings of a run, as parameters for a tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_GROUPS = ("model", "data", "objective", "optimizer", "schedule", "recovery", "checks", "drill", "experiment")
_WHOLE = ("model.", "optimizer.", "schedule.")  # nodes that are told of whatever their values
_ALWAYS = (
    *("run.steps", "run.seed", "data.batch_size", "clip.max_norm"),
    *("accelerate.gradient_accumulation_steps", "accelerate.mixed_precision"),
)
_NEVER = ("hydra.", "tracking.", "run.name", "run.dir", "run.resume")  # where it lies, or is shown
_PLUMBING = ("optimizer.fused", "optimizer.no_decay")
_MOST = 12  # settings of a node: of a larger one only those that were given


def compared(settings: Mapping[str, Any], choices: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Choose from `settings`, the leaves of a configuration: chosen options, what was given, and what always matters.

    What a command line gave, or a sweep, is always among them.
    """
    given = [word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides]
    chosen = {name: choices[name] for name in _GROUPS if choices.get(name) is not None}
    found = {key: one for key, one in settings.items() if key in _ALWAYS or _is_given(key, given)}
    for node in _WHOLE:
        name = node[:-1]
        leaves = {key: one for key, one in settings.items() if key.startswith(node) and key not in _PLUMBING}
        if chosen.get(name) != "custom":
            leaves.pop(f"{node}_target_", None)  # the option tells it
        found |= leaves if len(leaves) <= _MOST else {}
    for node, key in (
        ("model", "model._target_"),
        ("data", "data.train._target_"),
        ("objective", "objective._target_"),
    ):
        if chosen.get(node) == "custom" and key in settings:
            found[key] = settings[key]
    return chosen | {key: found[key] for key in sorted(found)}


def _is_given(key: str, given: Sequence[str]) -> bool:
    return not key.startswith(_NEVER) and any(key == one or key.startswith(f"{one}.") for one in given if "." in one)
