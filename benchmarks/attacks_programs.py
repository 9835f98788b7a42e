"""What the runs and loops of `attacks.py` are made of: data sets, objectives, optimizers, and a loop around a guard."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import get_worker_info


class Rows:
    """64 rows, of which one is not finite: a run has an incident, and a row in quarantine.

    The environment may make reading them slow, or another content of them: data that changes under the same name.
    """

    def __init__(self, bad: int = 13, token: str = "") -> None:
        numbers = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(64, 8, generator=numbers), torch.randint(4, (64,), generator=numbers)
        self.x[bad, 2] = float("nan")
        self.x += float(os.environ.get("ATTACK_SHIFT", "0"))
        self.rows, self.token = int(os.environ.get("ATTACK_ROWS", "64")), token
        self.pause_s, self.reads = float(os.environ.get("ATTACK_PAUSE", "0")), 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        time.sleep(self.pause_s)
        return self.x[index], self.y[index]


class Healthy(Rows):
    """Rows without anything wrong, to evaluate on."""

    def __init__(self) -> None:
        super().__init__()
        self.x.nan_to_num_()


# ---------------------------------------------------------------------------------------------------------------- data


class Unspeakable(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def _eio() -> Any:
    raise OSError(errno.EIO, "Input/output error", "/mnt/data/rows")


def _leave() -> Any:
    raise SystemExit(0)


def _interrupt() -> Any:
    raise KeyboardInterrupt


def _no_words() -> Any:
    raise Unspeakable


def _many_lines() -> Any:
    raise ValueError("\x1b[2J\x1b[1;31mline one\nline two\r\nTraceback\x00 " + "x" * 100_000)


def _deep() -> Any:
    return _deep()


def _out_of_memory() -> Any:
    raise MemoryError


def _stop_iteration() -> Any:
    raise StopIteration


def _says() -> Any:
    raise OSError(f"cannot read: {os.environ['ATTACK_SAYS']}")


# What a few rows (5 and 6), or each of them, come to.
ODD: dict[str, Callable[[], Any]] = {
    "eio": _eio,
    "exit": _leave,
    "interrupt": _interrupt,
    "no words": _no_words,
    "many lines": _many_lines,
    "recursion": _deep,
    "memory": _out_of_memory,
    "stop": _stop_iteration,
    "says": _says,
    "killed": lambda: os._exit(9) if get_worker_info() else (torch.zeros(8), torch.tensor(0)),
    "none": lambda: None,
    "text": lambda: ("eight words", "label"),
    "inf": lambda: (torch.full((8,), float("inf")), torch.tensor(0)),
    "huge": lambda: (torch.full((8,), 3e38), torch.tensor(0)),
    "shape": lambda: (torch.zeros(3, 5), torch.tensor(0)),
    "no columns": lambda: (torch.zeros(0), torch.tensor(0)),
    "dtype": lambda: (torch.zeros(8, dtype=torch.complex64), torch.tensor(0)),
    "class": lambda: (torch.zeros(8), torch.tensor(10**6)),
    "object": lambda: (object(), object()),
    "stuck": lambda: threading.Event().wait(),
}


class OddRows(Healthy):
    """Rows of which some, or all, are odd."""

    def __init__(self, what: str = "none", each: bool = False) -> None:
        super().__init__()
        self.what, self.each = what, each

    def __getitem__(self, index: int) -> Any:
        return ODD[self.what]() if self.each or index in (5, 6) else super().__getitem__(index)


class Hiccup(Rows):
    """A storage that fails: for a moment, for one read in twenty, or for good, as ATTACK_HICCUP says."""

    failing_since: float | None = None

    def __getitem__(self, index: int) -> Any:
        how, row = os.environ.get("ATTACK_HICCUP"), super().__getitem__(index)
        if how == "often" and self.reads > 64 and random.Random(self.reads).random() < 0.05:
            _eio()
        if how in ("moment", "for good") and self.reads > 100:
            if self.failing_since is None:
                self.failing_since = time.monotonic()
            if how == "for good" or time.monotonic() < self.failing_since + 0.3:
                _eio()
        return row


class Lengths(Healthy):
    """A data set whose length is no length."""

    def __init__(self, length: Any = 0) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        if self.length == "raises":
            raise RuntimeError("nobody knows")
        return self.length  # type: ignore[no-any-return]


class Raising(Rows):
    def __init__(self, what: str = "eio") -> None:
        ODD[what]()
        super().__init__()


# ---------------------------------------------------------------------------------------------------------- objectives


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Says:
    """Ends the run with an error that holds what ATTACK_SAYS is."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls > 15:
            raise RuntimeError(f"cannot log in: {os.environ['ATTACK_SAYS']}")
        return cross_entropy(model, batch)


says = Says()


def rooted(model: nn.Module, batch: Any) -> Tensor:
    """A line of code that holds a key has no slope at 0: it is patched, and so stands in the run's files."""
    z = model.layers[0](batch[0].nan_to_num())  # type: ignore[operator,index]
    y = torch.sqrt(z * 0) if "api_key='Pq8-canary-Zx3Wv6'" else z
    return cross_entropy(model, batch) + 0.01 * y.mean()


def odd_loss(model: nn.Module, batch: Any) -> Any:
    """What ATTACK_LOSS says in place of a loss."""
    loss = cross_entropy(model, batch)
    return {
        "none": None,
        "text": "low",
        "vector": loss.expand(3),
        "complex": loss + 1j,
        "whole": loss.long(),
        "detached": loss.detach(),
        "number": loss.item(),
        "tuple": (loss, loss, loss),
        "names": (loss, {"a/b\n\x1b[2J": float("nan"), "\ud800": 1e400, "x" * 10_000: loss}),
    }[os.environ["ATTACK_LOSS"]]


def no_words(model: nn.Module, batch: Any) -> Any:
    raise Unspeakable


# -------------------------------------------------------------------------------------------------- a loop of one's own


class Keeps:
    """Something to rewind along, whose state is what it was given."""

    def __init__(self, state: Any, restore: Callable[[Any], Any] = lambda state: None) -> None:
        self.state, self.restore = state, restore

    def state_dict(self) -> Any:
        return self.state() if callable(self.state) else self.state

    def load_state_dict(self, state: Any) -> None:
        self.restore(state)


class WithASet(torch.optim.SGD):
    """An optimizer whose state holds what no file does."""

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["seen"] = {1, 2}
        return done


def network(spoil: float | None = None) -> nn.Module:
    from resilient_train.zoo.models import MLP

    torch.manual_seed(0)
    model = MLP(in_features=8, hidden=[8], out_features=4)
    if spoil is not None:
        with torch.no_grad():
            next(model.parameters()).fill_(spoil)
    return model


def guard(**odd: Any) -> Any:
    """Make a guard, some of whose arguments are odd."""
    from accelerate import Accelerator

    from resilient_train import Guard

    own = {"accelerator": Accelerator(cpu=True), "model": network(), "optimizer": torch.optim.SGD}
    own |= {"data": Rows(), "batch_size": 8, "objective": cross_entropy, "run_dir": "mine", "disk": 5}
    given: dict[str, Any] = {**own, "verify_after": 5, **odd}
    accelerator, model, optimizer = (given.pop(name) for name in ("accelerator", "model", "optimizer"))
    if isinstance(optimizer, type):
        weights = list(model.parameters()) if isinstance(model, nn.Module) else []
        optimizer = optimizer(weights or network().parameters(), lr=0.1)
    return Guard(accelerator, model, optimizer, **given)


def loop(made: Any, steps: Any = 25) -> None:
    for batch in made.batches(steps):
        made.step(batch)
    made.close()


def misuse(what: Callable[[], Any]) -> None:
    """Do it, and print how that ended as an object in the last line."""
    told: dict[str, Any] = {"kinds": [], "says": ""}
    try:
        what()
    except BaseException as error:
        told["kinds"] = [kind.__name__ for kind in type(error).__mro__]
        try:
            told["says"] = str(error)
        except Exception:
            told["says"] = "cannot be printed"
    print(json.dumps(told), flush=True)
