"""A PostgreSQL server of Debian's package, on the loopback, for as long as a test needs it."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flaky_mlflow import free_port


def programs() -> Path | None:
    """Where the newest version keeps its programs; None if none is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


def _owner() -> str | None:
    """Who it runs as: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {one.pw_name for one in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@contextmanager
def postgres() -> Iterator[str]:
    """Yield the address of an empty database."""
    bin_dir, owner, port = programs(), _owner(), free_port()
    assert bin_dir is not None
    place = Path(tempfile.mkdtemp(prefix="postgres-", dir="/tmp"))  # a path that its owner may enter
    if owner is not None:
        shutil.chown(place, owner)
    data = place / "data"

    def run(*words: str) -> None:
        done = subprocess.run(words, user=owner, cwd=place, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr

    try:
        run(str(bin_dir / "initdb"), "-D", str(data), "-U", "tracker", "-A", "trust", "--no-sync")
        options = f"-p {port} -k {place} -c listen_addresses=127.0.0.1 -c fsync=off"
        run(str(bin_dir / "pg_ctl"), "-D", str(data), "-w", "-l", str(place / "log"), "-o", options, "start")
        try:
            yield f"postgresql+psycopg://tracker@127.0.0.1:{port}/postgres"
        finally:
            run(str(bin_dir / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(place, ignore_errors=True)
