"""The process that a run starts to have its outbox delivered while it trains.

What it is to do comes as a line of JSON, and another line once the run has ended. It says on its standard output, in
lines of JSON too, what the run is called in MLflow and what keeps it from delivering.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilient_train.tracking.connection import Connection, root_cause
from resilient_train.tracking.courier import Busy, Courier
from resilient_train.tracking.store import locate, shown

SEND_EVERY_S = 1.5
RETRY_AT_MOST_S = 30.0
LAST_PAUSES_S = (1.0, 1.0, 0.0)  # after each attempt to conclude: a server that is gone is not waited for
ALONE_S = 6.0  # to deliver what a run that was killed has left


def main(given: Mapping[str, Any]) -> int:
    """Deliver until the run has ended; return 0 if MLflow has everything."""
    # Whoever asks the run to stop asks all its processes; what it has to say then is still to be delivered.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    no_more = threading.Event()
    threading.Thread(target=_listen, args=[no_more], daemon=True).start()
    threading.Thread(target=_outlive_briefly, args=[os.getppid(), no_more], daemon=True).start()
    courier = Courier(
        Path(given["run_dir"]),
        locate(given["uri"], Path(given["home"])),
        given["experiment"],
        system_metrics=given["system_metrics"],
        met=_introduce,
    )
    return 0 if _deliver(courier, no_more) else 1


def _deliver(courier: Courier, no_more: threading.Event) -> bool:
    pause, failures = 0.0, 0
    while not no_more.wait(pause):
        error = _attempt(courier.deliver)
        failures = 0 if error is None else failures + 1
        pause = SEND_EVERY_S if error is None else min(2 * pause + 1, RETRY_AT_MOST_S)
        if error is not None and failures > 1:  # a single one is no news: a server closes connections that are idle
            _say(trouble=error)
    for pause in LAST_PAUSES_S:
        error = _attempt(courier.conclude)
        if error is None:
            if courier.report.refused:
                _say(refused=[shown(why) for why in courier.report.refused])
            return True
        _say(trouble=error)
        time.sleep(pause)
    return False


def _attempt(action: Any) -> str | None:
    """Do it, or say why it cannot be done now."""
    try:
        action()
    except (Busy, FileNotFoundError) as error:  # an earlier process's is about to end; nothing was written yet
        return str(error)
    except Exception as error:  # whatever goes wrong with tracking, the run goes on
        return " ".join(shown(root_cause(error)).split())[:300]
    return None


def _introduce(connection: Connection) -> None:
    _say(run=connection.run.as_dict())


def _say(**facts: Any) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        print(json.dumps(facts), flush=True)


def _listen(no_more: threading.Event) -> None:
    sys.stdin.readline()
    no_more.set()


def _outlive_briefly(parent: int, no_more: threading.Event) -> None:
    """Do not stay for long behind a run that was killed, whatever a server does."""
    while os.getppid() == parent:
        time.sleep(0.5)
    no_more.set()
    time.sleep(ALONE_S)
    os._exit(1)
