"""Imports what is large and hides it from the garbage collector: this process is done with it when it ends.

A collection visits all objects there are, and 300,000 are those of packages. Patches do not find functions that are
hidden: so this comes before the modules of any test, and imports nothing that a test patches.
"""

from __future__ import annotations

import gc
from importlib import import_module


def freeze(*packages: str) -> None:
    """Import packages, and hide them with all else that is there."""
    for name in packages:
        import_module(name)
    gc.collect()
    gc.freeze()


freeze("torch._dynamo", "accelerate", "hydra")
