"""The inputs of `attacks.py` that are a caller's own: odd data, odd losses, and a guard that is misused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from attacks_inputs import Attack
from attacks_place import Place
from attacks_programs import ODD, Keeps, Rows, WithASet, guard, loop, misuse, network, no_words
from torch import nn
from torch.optim.swa_utils import AveragedModel

# -------------------------------------------------------------------------------------------------------- odd data


def odd(*words: str, codes: tuple[int, ...] = (0, 1, 2, 3), says: str = "", **environment: Any) -> Attack:
    """A run on odd data completes, or ends with one of these codes and words for it."""

    def attack(place: Place) -> None:
        said = place.train(*words, **environment)
        if said.code not in codes:
            place.fails(f"ended with {said.code} instead of {codes}: {said.last}")
        if says not in said.text:
            place.fails(f"does not say {says!r}: {said.last}")
        if said.code in (1, 2) and not says:  # what hangs is told by another line
            place.refused(said, *codes)
        place.asked()

    return attack


def rows(what: str, *words: str, each: bool = False, **given: Any) -> Attack:
    own = ["data.train._target_=attacks_programs.OddRows", "~data.train.token", f"+data.train.what={what}"]
    return odd(*own, f"+data.train.each={each}", *words, **given)


def hiccup(how: str, code: int) -> Attack:
    """A storage fails: rows are fetched again, and none of them is blamed; it comes back, and the run is the same."""

    def attack(place: Place) -> None:
        words = ["data.train._target_=attacks_programs.Hiccup"]
        said = place.train(*words, ATTACK_HICCUP=how)
        if said.code != code:
            place.fails(f"ended with {said.code} instead of {code}: {said.last}")
        place.unharmed(place.train(*words) if code else said)

    return attack


def changed(*words: str, **environment: Any) -> Attack:
    """Other data under the same name is refused, whether or not some of it is in quarantine."""

    def attack(place: Place) -> None:
        if words:
            place.train(*words, "run.steps=20")
        else:
            place.copy()
        place.refused(place.train(*words, **environment), 2)

    return attack


def lengths(length: str) -> Attack:
    return odd("data.train._target_=attacks_programs.Lengths", "~data.train.token", f"+data.train.length={length}")


HEALTHY = ("data.train._target_=attacks_programs.Healthy", "~data.train.token")
WORKERS = ("data.num_workers=1", "run.start_timeout=25", "run.step_timeout=8")
DATA: dict[str, Attack] = {f"some rows: {what}": rows(what) for what in ODD if what not in ("killed", "stuck", "says")}
DATA |= {f"each row: {what}": rows(what, each=True) for what in ("eio", "inf", "none", "text", "no words", "class")}
DATA |= {
    f"no data set: {what}": odd(
        "data.train._target_=attacks_programs.Raising",
        "~data.train.token",
        f"+data.train.what='{what}'",
        codes=(0, 1, 2),
    )
    for what in ("eio", "exit", "no words", "many lines", "recursion")
}
DATA |= {f"{length} rows": lengths(length) for length in ("0", "-1", "1", "3", "4611686018427387904", "2.5", "raises")}
DATA |= {
    "a worker that is killed": rows("killed", *WORKERS, codes=(0, 1, 3)),
    "a worker that is stuck": rows("stuck", *WORKERS, codes=(1,), says="data loader"),
    "a row that is stuck": rows(
        "stuck", "run.start_timeout=6", "run.step_timeout=6", codes=(1,), says="attacks_programs"
    ),
    "EIO for a moment": hiccup("moment", 0),
    "EIO for one read in twenty": hiccup("often", 0),
    "EIO for good": hiccup("for good", 1),
    "fewer rows under the same name": changed(*HEALTHY, ATTACK_ROWS="60"),
    "other rows under the same name": changed(*HEALTHY, ATTACK_SHIFT="1"),
    "fewer rows, one of them in quarantine": changed(ATTACK_ROWS="60"),
    "other rows, one of them in quarantine": changed(ATTACK_SHIFT="1"),
    "a batch larger than the data": odd("data.batch_size=1000"),
}
OWN = ("objective=custom", "objective._target_=attacks_programs.odd_loss")
DATA |= {
    f"a loss: {what}": odd(*OWN, codes=(0, 1, 2, 3), ATTACK_LOSS=what)
    for what in ("none", "text", "vector", "complex", "whole", "detached", "number", "tuple", "names")
}
DATA |= {
    "an objective whose error has no words": odd(
        "objective=custom", "objective._target_=attacks_programs.no_words", codes=(1,), says="Unspeakable"
    )
}


# -------------------------------------------------------------------------------------------------- a misused guard

REFUSALS = {"TypeError", "ValueError", "TrainError"}  # what a caller is told by; ConfigError is two of them


def misused(what: Callable[[], Any], *, works: bool | None = False, says: str = "", saves: bool = False) -> Attack:
    """It is refused in one line, of a kind that a caller expects; with None it may work as well, and then it saves."""

    def attack(place: Place) -> None:
        said = place.start(misuse, what).end("the loop", 60.0)
        told = json.loads(said.out.splitlines()[-1]) if said.out.strip() else {}
        kinds, text = told.get("kinds"), told.get("says", "")
        if kinds is None or said.code:
            place.fails(f"the process ended with {said.code}: {said.last}")
        if not kinds and works is False:
            place.fails("was taken without a word")
        if not kinds and saves and not [*place.path.glob("mine/checkpoints/step-*")]:
            place.fails("trained to the end, and no checkpoint was ever written")
        if kinds and works:
            place.fails(f"{kinds[0]}: {text[:200]}")
        if kinds and not (REFUSALS & {*kinds} or says):
            place.fails(f"is told by {kinds[0]}: {text[:200]}")
        if kinds and (len(text.strip().splitlines()) != 1 or len(text) > 800) and not says:
            place.fails(f"is told in {len(text.splitlines())} lines, {len(text)} letters: {text[:100]}")
        if kinds and says and says not in (kinds[0], *kinds):
            place.fails(f"{kinds[0]} hides {says}: {text[:200]}")

    return attack


def kept(item: Any, name: str = "mine") -> None:
    """Keep something along, in a run that writes checkpoints."""
    made = guard()
    made.keep(**{name: item})
    loop(made)


def handed(what: Callable[[Any, Any], Any]) -> None:
    """Do something else with a batch than to hand it back."""
    made = guard(objective=None)
    for batch in made.batches(25):
        what(made, batch)


def bad(name: str, *values: Any, works: bool | None = False) -> dict[str, Attack]:
    def use(value: Any) -> Callable[[], None]:
        return lambda: loop(guard(**{name: value}))

    return {f"{name}={value!r:.40}".partition(" at 0x")[0]: misused(use(value), works=works) for value in values}


NAN, INF = float("nan"), float("inf")
EVIL = {"ladders": {"default": [[{"os.system": {"command": "touch canary"}}]]}}
itself: list[Any] = []
itself.append(itself)
GUARD: dict[str, Attack] = {"nothing wrong": misused(lambda: loop(guard()), works=True)}
for name, values in {
    "accelerator": ("cpu", 5), "model": (None, "mlp", 5, dict), "optimizer": (None, "adam", [], 5),
    "data": (None, 5, "rows", [], object()), "batch_size": (0, -1, 2.5, "8", NAN),
    "recovery": ("nope", 5, None, {}, {"ladders": 5}, EVIL),
    "checks": ("nope", 5, None, {"jump": 5}), "clip": ("x", NAN, INF, -1, [1]), "memory": (5, "x", NAN),
    "verify_after": ("x", NAN), "seed": ("x", NAN), "collate": (5, "x"),
    "quarantine": ("/dev/null", "nope.json", 5), "disk": ("x", -5, NAN, 2.5), "run_dir": (5, "/dev/null/x", "a\0b"),
    "drill": (5, "nan_grad"), "schedule": (5, "cosine"), "objective": (5, "mse"), "tracking": (5,), "stop": (5,),
}.items():  # fmt: skip
    GUARD |= bad(name, *values)
for name, values in {
    "verify_after": (-1, 2.5), "seed": (10**40,), "batch_size": (1000,), "num_workers": (-1, "x", 2.5), "tracking": ("gopher://x",),
    "shuffle": ("maybe",),
}.items():  # fmt: skip
    GUARD |= bad(name, *values, works=None)
GUARD |= {
    "a model without weights": misused(lambda: loop(guard(model=nn.Flatten()))),
    "a model of NaN": misused(lambda: loop(guard(model=network(NAN))), works=None),
    "weights of another model": misused(lambda: loop(guard(optimizer=torch.optim.SGD(network().parameters(), 0.1)))),
    "an optimizer with a set": misused(lambda: loop(guard(optimizer=WithASet))),
    "batches of text": misused(lambda: loop(guard(), "5")),
    "batches of nan": misused(lambda: loop(guard(), NAN)),
    "batches below 0": misused(lambda: loop(guard(), -1), works=None),
    "a batch not handed back": misused(lambda: handed(lambda made, batch: None)),
    "a loss of text": misused(lambda: handed(lambda made, batch: made.update("low"))),
    "a loss of three": misused(lambda: handed(lambda made, batch: made.update(torch.ones(3)))),
    "a loss without gradient": misused(lambda: handed(lambda made, batch: made.update(torch.ones(())))),
    "step without an objective": misused(lambda: handed(lambda made, batch: made.step(batch))),
    "a batch handed back twice": misused(lambda: [(m := guard(), b := next(m.batches(9))), m.step(b), m.step(b)]),
    "step before batches": misused(lambda: guard().step(None)),
    "a batch of None": misused(lambda: [m.step(None) for m in [guard()] for _ in m.batches(9)], works=None),
    "an evaluation of text": misused(lambda: guard().evaluated({"loss": "low"})),
    "an evaluation of nan": misused(lambda: guard().evaluated({"loss": NAN}), works=None),
    "an evaluation that is a number": misused(lambda: guard().evaluated(5)),
    "two guards in one place": misused(lambda: (guard(), guard()), works=None),
    "kept late": misused(lambda: [(m := guard(), next(m.batches(9))), m.keep(x=network())]),
    "an error without words": misused(lambda: loop(guard(objective=no_words)), says="Unspeakable"),
    "kept: no state": misused(lambda: kept(5)),
    "kept: a module": misused(lambda: kept(network()), works=True, saves=True),
    "kept: an average": misused(lambda: kept(AveragedModel(network())), works=True, saves=True),
    "kept: a state that raises": misused(lambda: kept(Keeps(lambda: no_words(nn.Flatten(), None))), says="Unspeakable"),
    "kept: a restore that raises": misused(
        lambda: kept(Keeps({"a": 1}, lambda state: no_words(nn.Flatten(), None))), works=None
    ),
}
for what, state in {
    "a set": {1, 2}, "a function": {"f": print}, "an object": {"o": object()}, "itself": itself,
    "bytes": {"b": b"x" * 10},
    "nothing": None, "nan": {"n": NAN}, "a class": Rows, "2^70": {"n": 2**70}, "a lock": threading.Lock(),
    "half a pair": {"s": "\ud800"}, "odd keys": {None: 1, (1, 2): 2, NAN: 3}, "a complex": {"c": 1j},
    "a sparse tensor": {"s": torch.eye(3).to_sparse()}, "a meta tensor": {"m": torch.empty(3, device="meta")},
}.items():  # fmt: skip
    GUARD[f"kept: {what}"] = misused(lambda state=state: kept(Keeps(lambda: state)), works=None, saves=True)  # type: ignore[misc]
for name in ("../../evil", "a/b", "", "x" * 5000, "\n", "weights", "optimizer.0"):
    GUARD[f"kept as {name!r:.20}"] = misused(lambda name=name: kept(Keeps({"a": 1}), name), works=None, saves=True)  # type: ignore[misc]
