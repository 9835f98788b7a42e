"""Runs a command of the user's when a run needs attention."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

from resilient_train.app.config import NotifyConfig
from resilient_train.errors import in_one_line
from resilient_train.secrets import masked_tree
from resilient_train.wording import log

_TIMEOUT_S = 30.0


def notify(config: NotifyConfig, event: str, directory: Path, summary: dict[str, Any], message: str) -> None:
    """Run the command, if there is one, with a line of JSON on its standard input. A failure is only a warning.

    `event` is one of gave_up, hang, error and not_recovered.
    """
    if config.command is None:
        return
    fields = ("status", "exit_code", "steps", "final_loss", "incidents", "mlflow")
    about = {"event": event, "message": message, "run_dir": str(directory.absolute()), "host": platform.node()}
    line = json.dumps(masked_tree({**about, **{key: summary.get(key) for key in fields}}))
    words = shlex.split(config.command)
    try:
        done = subprocess.run(words, input=f"{line}\n", text=True, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("notify.command could not be run: %s", in_one_line(error))
        return
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        log.warning("notify.command exited with %d%s", done.returncode, f": {said[-1]}" if said else "")
