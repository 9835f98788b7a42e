"""Runs a script as `python SCRIPT ...` would, and strikes it in a backward pass: `python kill_script.py SCRIPT ...`.

NAN_AT is the backward whose loss is multiplied by NaN, KILL_AT the one in which the process is killed, both counted
from 1.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch

AT = {name: int(os.environ.get(name, "0")) for name in ("NAN_AT", "KILL_AT")}

plain, calls = torch.Tensor.backward, 0


def backward(loss: torch.Tensor, *args: Any, **more: Any) -> None:
    global calls
    calls += 1
    if calls == AT["KILL_AT"]:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(loss * torch.nan if calls == AT["NAN_AT"] else loss, *args, **more)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    torch.Tensor.backward = backward  # type: ignore[assignment,method-assign]
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
