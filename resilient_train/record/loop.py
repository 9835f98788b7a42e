"""loop.json: what makes a directory that of a loop of somebody's own, as config.yaml does for a run of ours."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from resilient_train.files import commit_text, read_json
from resilient_train.secrets import masked_tree

LOOP = "loop.json"  # its name in a run directory

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Loop:
    """What is known of a loop from outside."""

    steps: int | None = None  # accepted updates that are wanted
    goes_on: bool = False  # the same program takes it up where it ended; else it begins anew, in the next directory
    given: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)  # what a person compares it by

    def write(self, run_dir: Path) -> None:
        """Commit it to disk."""
        node = {"steps": self.steps, "goes_on": self.goes_on, "given": dict(self.given)}
        commit_text(run_dir / LOOP, json.dumps(masked_tree(node), indent=2) + "\n")


def begins_again_in(run_dir: Path) -> str:
    """The name of the directory that a loop which does not resume would write to next."""
    first = run_dir.absolute()
    if (base := re.fullmatch(r"(.+)-\d+", first.name)) and (first.with_name(base[1]) / LOOP).exists():
        first = first.with_name(base[1])
    beside = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(one.name for one in beside if not one.exists())


def loop_of(run_dir: Path) -> Loop | None:
    """Return what the loop in a directory has written down; None where there is none."""
    node = read_json(run_dir / LOOP)
    if not isinstance(node, dict):
        return None
    steps, given = node.get("steps"), node.get("given")
    return Loop(
        steps=steps if type(steps) is int else None,
        goes_on=node.get("goes_on") is True,
        given=given if isinstance(given, dict) else _NOTHING,
    )
