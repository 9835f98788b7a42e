"""Functions in processes of their own, alone or as the ranks of a group, without the seconds that a start takes.

A server imports everything once and forks, so a child is there in a moment, and can be killed like any other process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 90.0

_context = get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "accelerate", "resilient_train.session"])


def alone(what: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Call it in a process, and return the exit code, and what it returned if it came to that."""
    ((code, told),) = together(1, what, *args)
    return code, told


def together(size: int, what: Callable[..., Any], *args: Any) -> list[tuple[int, Any]]:
    """Call it on every rank of a group that torch's collectives connect: exit codes, and what each returned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(size):
        receiver, sender = _context.Pipe(duplex=False)
        group: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        child = _context.Process(target=_in_child, args=(group if size > 1 else {}, sender, what, args), daemon=True)
        child.start()
        sender.close()
        started.append((child, receiver))
    ended = []
    for child, receiver in started:
        try:
            told = receiver.recv() if receiver.poll(LIMIT_S) else None
        except EOFError:
            told = None
        child.join(LIMIT_S)
        if child.exitcode is None:
            child.kill()
            child.join()
        receiver.close()
        assert child.exitcode is not None
        ended.append((child.exitcode, told))
    return ended


def _in_child(group: dict[str, Any], sender: Connection, what: Callable[..., Any], args: Sequence[Any]) -> None:
    os.environ.update({key: str(value) for key, value in group.items()})
    sender.send(what(*args))
