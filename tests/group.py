"""Functions in processes of their own, alone or as the ranks of a group, without the seconds that a start takes.

The ranks meet as those of an elastic agent do, at a store that is not theirs; the agent itself is not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from fork_server import ENVIRONMENT, Forked, python
from paused_run import HELD
from torch.distributed import TCPStore  # type: ignore[attr-defined]

LIMIT_S = 240.0  # of what takes seconds


def alone(what: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Call it in a process, and return the exit code, and what it returned if it came to that."""
    ((code, told),) = together(1, what, *args)
    return code, told


def together(size: int, what: Callable[..., Any], *args: Any) -> list[tuple[int, Any]]:
    """Call it on every rank of a group that torch's collectives connect: exit codes, and what each returned."""
    receivers, ranks = [], []
    with met(size) as environments:
        for environment in environments:
            receiver, sender = Pipe(duplex=False)
            receivers.append(receiver)
            ranks.append(Forked(_tell, sender, what, args, environment=environment))
            sender.close()
        told = [_heard(receiver) for receiver in receivers]
        return list(zip(ended(ranks), told, strict=True))


def agreed(size: int, what: Callable[..., Any], *args: Any) -> Any:
    """Call it on every rank: all of them end well, and what all have returned is the same."""
    codes, told = zip(*together(size, what, *args), strict=True)
    assert codes == (0,) * size
    assert all(one == told[0] for one in told)
    return told[0]


class Done(NamedTuple):
    """How a command ended on each rank, and what all of them said."""

    codes: list[int | None]  # none of one that is at work
    stdout: str
    stderr: str

    @property
    def is_well(self) -> bool:
        return set(self.codes) == {0}


class Group:
    """The ranks of a run, each of which was given `python WORDS` in `place`."""

    def __init__(self, place: Path, size: int, *words: str, **environment: str) -> None:
        place.mkdir(exist_ok=True)
        (place / HELD).unlink(missing_ok=True)
        self._out, self._errors = place.with_name(f"{place.name}.out"), place.with_name(f"{place.name}.err")
        for file in (self._out, self._errors):
            file.write_text("")
        self._open = ExitStack()
        self.ranks = [
            Forked(python, *words, place=place, out=self._out, errors=self._errors, environment=own | environment)
            for own in self._open.enter_context(met(size))
        ]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        for rank in self.ranks:
            rank.kill()
        self._open.close()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, while all of them are there."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert all(rank.ended() is None for rank in self.ranks), self._done()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {LIMIT_S:.0f} s: {self._done()}")
            time.sleep(0.005)

    def wait(self) -> Done:
        ended(self.ranks)
        return self._done()

    def _done(self) -> Done:
        codes = [rank.ended() for rank in self.ranks]
        return Done(codes, self._out.read_text(errors="replace"), self._errors.read_text(errors="replace"))


def launch(place: Path, size: int, *words: str, **environment: str) -> Done:
    """Give `python WORDS` to every rank of a group, in `place`, and wait for their end."""
    with Group(place, size, *words, **environment) as group:
        return group.wait()


@contextmanager
def met(size: int) -> Iterator[list[dict[str, str]]]:
    """Give every rank of a group what a launcher puts into its environment; nothing, if it is alone."""
    if size == 1:
        yield [ENVIRONMENT]
        return
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    own = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    yield [ENVIRONMENT | {name: str(value) for name, value in one.items()} for one in own]


def ended(ranks: list[Forked]) -> list[int]:
    try:
        return [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _heard(receiver: Connection) -> Any:
    with receiver:
        try:
            return receiver.recv() if receiver.poll(LIMIT_S) else None
        except EOFError:
            return None


def _tell(sender: Connection, what: Callable[..., Any], args: tuple[Any, ...]) -> None:
    sender.send(what(*args))
