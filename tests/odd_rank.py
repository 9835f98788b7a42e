"""The command, on ranks of which one does otherwise about an incident while ODD_RANK names it."""

from __future__ import annotations

import os
from typing import Any

from resilient_train.command import command
from resilient_train.core.controls import Controls

apply = Controls.apply


def otherwise(controls: Controls, *given: Any, **more: Any) -> Any:
    controls.knobs.turn_lr(0.5)
    return apply(controls, *given, **more)


if __name__ == "__main__":
    if os.environ.get("ODD_RANK") == os.environ["RANK"]:
        Controls.apply = otherwise  # type: ignore[assignment, method-assign]
    command.main()
