"""Imports large packages and hides their objects from the garbage collector, as they stay until the process ends.

A full collection would visit them all each time, 300,000 and more. Armor does not find functions that are hidden: so
this comes before the modules of any test, and imports nothing that a test patches.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module


def freeze(*packages: str) -> None:
    """Import packages as far as they are installed, and hide them with all else that is there."""
    for name in packages:
        with suppress(ImportError):  # the tests that need it say so themselves
            import_module(name)
    gc.collect()
    gc.freeze()


freeze("torch._dynamo", "accelerate", "hydra")
