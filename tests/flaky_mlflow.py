"""A real MLflow server behind a door that can hang, fail, or swallow the answer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Mood = Literal["pass", "hang", "fail", "swallow"]
_started: list[subprocess.Popen[bytes]] = []  # Python complains of one that is forgotten before it has ended
_FAILS = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def started_server(place: Path, store: str) -> tuple[int, str]:
    """Start a server on the loopback, in a process group of its own; return its process and its address."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(place / "artifacts")]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    with (place / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=place, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True
        )
    _started.append(process)
    address = f"http://127.0.0.1:{port}"
    while not _answers(f"{address}/health"):
        assert process.poll() is None, (place / "server.log").read_text()
        time.sleep(0.1)
    return process.pid, address


@contextmanager
def mlflow_server(place: Path, store: str) -> Iterator[str]:
    """Run a server until it is not needed any more; yield its address."""
    pid, address = started_server(place, store)
    try:
        yield address
    finally:
        os.killpg(pid, signal.SIGKILL)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Door:
    """Passes bytes on to a server, in the mood it is in; a change of mood cuts what is open."""

    def __init__(self, address: str) -> None:
        self._server = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._mood: Mood = "pass"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._welcome, daemon=True).start()

    @property
    def mood(self) -> Mood:
        return self._mood

    @mood.setter
    def mood(self, mood: Mood) -> None:
        self._mood = mood
        self._cut()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()

    def _cut(self) -> None:
        with self._lock:
            open_ones, self._open = self._open, []
        for one in open_ones:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                guest, _ = self._listener.accept()
                with self._lock:
                    self._open.append(guest)
                threading.Thread(target=self._serve, args=[guest], daemon=True).start()

    def _serve(self, guest: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._mood == "fail":
                guest.recv(2**16)
                guest.sendall(_FAILS)
                guest.shutdown(socket.SHUT_RDWR)
            elif self._mood in ("pass", "swallow"):
                server = socket.create_connection(self._server)
                with self._lock:
                    self._open.append(server)
                threading.Thread(target=_pour, args=[guest, server], daemon=True).start()
                if self._mood == "pass":
                    _pour(server, guest)
                else:
                    server.recv(1)  # it has done what it was asked for, and nobody hears of it
                    guest.shutdown(socket.SHUT_RDWR)
                    server.shutdown(socket.SHUT_RDWR)


def _pour(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while some := source.recv(2**16):
            target.sendall(some)
        target.shutdown(socket.SHUT_WR)
