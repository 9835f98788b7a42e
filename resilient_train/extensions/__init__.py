"""Capabilities of a run. Each is a file or a folder that knows nothing but the core, and can be deleted.

`DEFAULT` lists those of this package in the order in which they are built: with a file, delete its line. Other packages
add theirs by the entry point `resilient_train.extensions`: docs/extend.md.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from resilient_train.core.protocols import Extension
from resilient_train.core.remedies import KNOWN
from resilient_train.ground.errors import in_one_line, unusable

GROUP = "resilient_train.extensions"
DEFAULT = (
    "checks:LossChecks",
    "scans.examination:StateScans",
    "diagnosis.extension:CauseFinder",
    "on_purpose:OnPurpose",
    "quarantine:RowsLeftOut",
    "optimizer_remedies:FurtherRemedies",
    "out_of_memory:SmallerBatches",
    "exceptions:BatchErrors",
    "armor.extension:PatchedLines",
    "trials:Trials",
    "lost_device:LostDevice",
    "drills:Drill",
)


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
            raise unusable(
                f"extension {entry.name}", f"{entry.value} is no subclass of {Extension.__module__}.Extension"
            )
        kinds.append(kind)
    for kind in kinds:
        for name, remedy in kind.remedies.items():
            if KNOWN.setdefault(name, remedy) is not remedy:
                raise unusable(f"extension {kind.__name__}", f"there is another remedy with the name {name}")
    return tuple(kinds)
