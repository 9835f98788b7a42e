"""Import this first: from then on Python keeps the bytecode of what it imports, as do all processes that tests start.

Where Python is told to write none, as in many containers, each process would compile torch and the others again, which
takes longer than all else about its start. It is kept in a folder of its own, so that no other folder has more in it
than what a test or a run has put there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = os.environ.setdefault(
    "PYTHONPYCACHEPREFIX", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "bytecode")
)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode, sys.pycache_prefix = False, FOLDER
