"""What a process does once for all tests that it runs, and for the processes that are forked from it.

It imports large packages and hides their objects from the garbage collector, as they stay until the process ends. A
full collection would visit them all each time, 300,000 and more. Armor does not find functions that are hidden: so this
comes before the modules of any test, and imports nothing that a test patches.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

CONF = str(Path(__file__).resolve().parents[1] / "conf")


def freeze(*packages: str) -> None:
    """Import packages as far as they are installed, and hide them with all else that is there."""
    for name in packages:
        with suppress(ImportError):  # the tests that need it say so themselves
            import_module(name)
    gc.collect()
    gc.freeze()


def parsed(stream: Any, Loader: Any) -> Any:
    """Parse YAML, and each file of conf/ once: a command reads twenty of them, twice."""
    name = str(getattr(stream, "name", None))
    if not name.startswith(CONF):
        return _load(stream, Loader)
    if name not in _trees:
        _trees[name] = _load(stream, Loader)
    return deepcopy(_trees[name])


_load, _trees = yaml.load, dict[str, Any]()
yaml.load = parsed
freeze("torch._dynamo", "accelerate", "hydra")
