"""The command, on ranks of which one decides otherwise about an incident while ODD_RANK names it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from resilient_train import recovery
from resilient_train.app import command
from resilient_train.recover.decide import decide
from resilient_train.types import Action, Decision


def otherwise(*given: Any, **more: Any) -> Decision:
    decided = decide(*given, **more)
    return replace(decided, actions=(*decided.actions, Action("lower_lr", {"factor": 0.5})))


if __name__ == "__main__":
    if os.environ.get("ODD_RANK") == os.environ["RANK"]:
        vars(recovery)["decide"] = otherwise
    command.main()
