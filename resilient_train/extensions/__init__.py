"""Capabilities of a run. Each is a file or a folder that knows nothing but the core, and can be deleted.

`DEFAULT` lists those of this package in the order in which they are built: with a file, delete its line. Other packages
add theirs by the entry point `resilient_train.extensions`: docs/extend.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

from resilient_train.core.checks import Check
from resilient_train.core.remedies import KNOWN, Remedy
from resilient_train.ground.errors import in_one_line, unusable
from resilient_train.ground.types import Diagnosis

GROUP = "resilient_train.extensions"
DEFAULT = (
    "checks:LossChecks",
    "scans.examination:StateScans",
    "diagnosis:CauseFinder",
    "on_purpose:OnPurpose",
    "quarantine:RowsLeftOut",
    "optimizer_remedies:FurtherRemedies",
    "out_of_memory:SmallerBatches",
    "exceptions:BatchErrors",
    "armor:PatchedLines",
    "trials:Trials",
    "lost_device:LostDevice",
    "drills:Drill",
)


class Sink:
    """Gets what happens in a run, as data."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Take an event: `kind` says what it is, such as "metrics" or "incident_opened". Called on rank 0 only."""

    def close(self) -> None:
        """The run has ended."""


class Extension:
    """A capability of a run, made for each guard. Whatever a class leaves out, it does not add."""

    remedies: ClassVar[Mapping[str, type[Remedy]]] = {}  # by the names that policies use
    settings: ClassVar[Mapping[str, type]] = {}  # of its checks: dataclasses, by their names under `checks`
    node: ClassVar[str] = ""  # of the configuration, which `configured` reads

    @classmethod
    def configured(cls, node: Any, steps: int) -> Extension:
        """Make it for a run of the command with so many steps: `node` is its configuration."""
        return cls()

    def wrapped(self, dataset: Any) -> Any:
        """Return what the command trains on in place of a data set."""
        return dataset

    def checks(self, settings: Any) -> Mapping[str, Check]:
        """Return its checks by their names in checkpoints; `settings` has those of all checks by name."""
        return {}

    def build(self, run: Any) -> None:
        """Add to a run, a `parts.run.Run`, which is put together: hooks, effects, sinks. Each rank calls it."""

    def facts(self, diagnosis: Diagnosis, since: int, has_landed: bool) -> Mapping[str, Any]:
        """Return what its remedies need to know of a case. All ranks call it together."""
        return {}

    def close(self) -> None:
        """Undo what affects the whole process, at the end of the run."""


@cache
def load() -> tuple[type[Extension], ...]:
    """Import all extensions that are installed, and make their remedies known."""
    kinds: list[type[Extension]] = []
    for place in DEFAULT:
        module, _, name = place.partition(":")
        kinds.append(getattr(import_module(f"{__name__}.{module}"), name))
    for entry in entry_points(group=GROUP):
        try:
            kind: Any = entry.load()
        except Exception as error:
            raise unusable(
                f"extension {entry.name}", f"{entry.value} cannot be imported: {in_one_line(error)}"
            ) from error
        if not isinstance(kind, type) or not issubclass(kind, Extension):
            raise unusable(f"extension {entry.name}", f"{entry.value} is no subclass of {__name__}.Extension")
        kinds.append(kind)
    for kind in kinds:
        make_known(kind)
    return tuple(kinds)


def make_known(kind: type[Extension]) -> None:
    """Let policies name the remedies of an extension."""
    for name, remedy in kind.remedies.items():
        if KNOWN.setdefault(name, remedy) is not remedy:
            raise unusable(f"extension {kind.__name__}", f"there is another remedy with the name {name}")
