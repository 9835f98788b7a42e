"""The run as an experiment tracker shows it, at no cost to the training thread.

What there is to show goes into the outbox, a file. Another process, `resilient-train sync --follow`, reads it and
talks to MLflow: neither MLflow's import nor a slow or dead server can hold up a step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from resilient_train.durable.journal import BEGAN, ENDED, METRICS, OUTBOX, Outbox
from resilient_train.ground.secrets import masked
from resilient_train.ground.wording import log
from resilient_train.report.connection import UploadCursor, locate
from resilient_train.report.story import command

EXPERIMENT = "resilient_train"  # of the caller's own loop; conf/tracking names the same one for the command

UPLOAD_LOG = "upload.log"  # in the run directory: what prevents an upload


@dataclass
class TrackingConfig:
    kind: Literal["mlflow", "none"]
    uri: str | None
    experiment: str
    drain_s: float = field(metadata={"at_least": 0})


class Tracker:
    """Takes what is worth showing; only `finish` may wait, and no call raises. This one shows nothing."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Take an event, as any sink does."""

    def close(self) -> None:
        """The events are over; `finish` uploads the rest."""

    def finish(self) -> dict[str, Any] | None:
        """Upload the rest within the time configured, once summary.json is written; return the run in MLflow."""
        return None


class OutboxTracker(Tracker):
    def __init__(self, config: TrackingConfig, directory: Path, uri: str, params: Mapping[str, str]) -> None:
        self._config, self._directory, self._uri, self._params = config, directory, uri, params
        cursor = UploadCursor(directory)
        cursor.aim(masked(uri), config.experiment)
        self.uploader: subprocess.Popen[bytes] | None = None
        self._has_begun = False
        self._outbox = Outbox(directory / OUTBOX)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._outbox.put(BEGAN, key=uuid4().hex, params=self._params)
            self._start_uploader()

    def write(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == METRICS:  # all else is in the journal, which the uploader reads
            self._begin()
            self._outbox.put(METRICS, tick=event["tick"], values=event["values"])

    def finish(self) -> dict[str, Any] | None:
        self._begin()
        self._outbox.put(ENDED)
        if self.uploader is None or self.uploader.poll() is not None:
            self._start_uploader()  # once more
        if trouble := self._finish_uploads():
            what = "MLflow at %s did not get everything (%s); to upload the rest, from any machine:\n  %s"
            log.warning(what, self._uri, trouble, command("sync", self._directory))
        return UploadCursor(self._directory).run  # from the file that the uploader keeps there

    def _finish_uploads(self) -> str:
        """Wait for the process within the time configured; return what it lacks, empty if nothing."""
        if self.uploader is None:
            return "no process can be started"
        what = "uploading to MLflow, for up to %g s; Ctrl-C leaves the rest to %s"
        log.info(what, self._config.drain_s, command("sync", self._directory))
        try:
            if not self.uploader.wait(self._config.drain_s):
                return ""
            why = f"its process ended with {self.uploader.returncode}"
        except subprocess.TimeoutExpired:
            why = "it took too long"
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            self.uploader.kill()
            self.uploader.wait()
        with suppress(OSError):  # the directory may be gone
            said = (self._directory / UPLOAD_LOG).read_text(encoding="utf-8", errors="replace")
            why = [why, *said.splitlines()][-1]
        return why

    def _start_uploader(self) -> None:
        """Start `resilient-train sync --follow`, whose log has what prevents an upload, a line for each trouble."""
        # -P: else a mlflow.py in the working directory would be imported.
        start = [sys.executable, "-P", "-m", "resilient_train", "sync", str(self._directory.absolute()), "--follow"]
        # The address may hold a password, so it is no argument: those are public. Modules are found where ours are.
        environment = {
            **os.environ,
            "MLFLOW_TRACKING_URI": self._uri,
            "PYTHONPATH": os.pathsep.join(map(str, sys.path)),
        }
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            with open(self._directory / UPLOAD_LOG, "wb") as said:
                self.uploader = subprocess.Popen(
                    start,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # a Ctrl-C is not meant for it
                )
        except (OSError, RuntimeError) as error:  # RuntimeError: at the exit of the interpreter
            log.warning("no process can be started that uploads to MLflow: %s", error)


def build(config: TrackingConfig, directory: Path, home: Path, params: Mapping[str, Any] | None = None) -> Tracker:
    """`home` holds the database if no other store is named; runs are compared by `params`."""
    if config.kind == "none":
        return Tracker()
    shown = {key: masked(str(value)) for key, value in (params or {}).items()}
    return OutboxTracker(config, directory, locate(config.uri, home), shown)
