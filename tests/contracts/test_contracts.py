"""What every check, remedy, gate, data source and hook promises, over all that there are.

An implementation is found in the parts of a guard, so one that is added or deleted needs no change here.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from guarded import adamw, cross_entropy, guarded, handed_over, often, rows
from torch import nn
from torch.utils.data import DataLoader
from user_programs import Counting

from resilient_train.core.gate import DeviceGate, HostGate, OpenGate
from resilient_train.core.protocols import Hook
from resilient_train.core.remedies import KNOWN
from resilient_train.core.transaction import Transaction
from resilient_train.data.trees import sha256
from resilient_train.ground.types import Action, Anomaly, Cause, Decision, Diagnosis, Incident, Signal, Vitals
from resilient_train.loop.guard import Guard

CPU = torch.device("cpu")


def plain(state: Any) -> Any:
    return json.loads(json.dumps(state))


def small(**more: Any) -> Guard:
    return guarded(adamw, None, memory=often(5), verify_after=3, **more)


# ---------------------------------------------------------------------------------------------------------- checks


def checks() -> Any:
    return small()._checks


@cache
def names_of_checks() -> list[str]:
    return [*checks()._checks]


def measured(seed: int, steps: range) -> Iterator[Vitals]:
    """Updates of a run whose loss falls, with outliers, spikes, a jump and a rate that rises."""
    dice = random.Random(seed)
    for step in steps:
        high = 4.0 if 120 <= step < 126 else 1.0
        loss = high * (2 + math.exp(-step / 40)) * math.exp(dice.gauss(0, 0.1))
        ratio = 3.0 if step > 150 else 1.0
        yield Vitals(step, step, True, loss, math.exp(dice.gauss(0, 0.3)), 1e-3, 8 * step, 8 * step + 8, lr_ratio=ratio)


def judged(panel: Any, steps: range, seed: int = 0) -> Any:
    for vitals in measured(seed, steps):
        panel.judge(vitals)
    return panel


@pytest.mark.parametrize("name", names_of_checks())
def test_the_state_of_a_check_goes_round(name: str) -> None:
    """What rewinds, and what does not, is restored from plain data as it was, in a process that has learned nothing."""
    one, other = judged(checks(), range(1, 200))._checks[name], checks()._checks[name]
    other.load_state_dict(plain(one.state_dict()))
    other.load_persistent_state(plain(one.persistent_state()))
    assert plain(other.state_dict()) == plain(one.state_dict())
    assert plain(other.persistent_state()) == plain(one.persistent_state())


@pytest.mark.parametrize("name", names_of_checks())
@pytest.mark.parametrize("resumes", [False, True])
def test_a_check_rewinds(name: str, resumes: bool) -> None:
    """Put back, here or in the next process, it learns what it would have learned; nothing is shared."""
    panel = judged(checks(), range(1, 90))
    state, lasting = panel.state_dict(), panel.persistent_state()
    kept = plain(state)
    expected = plain(judged(panel, range(90, 110)).state_dict()[name])
    judged(panel, range(110, 118), seed=5)
    if resumes:
        panel, state = checks(), plain(state)
        panel.load_persistent_state(plain(lasting))
    panel.load_state_dict(state)
    assert plain(judged(panel, range(90, 110)).state_dict()[name]) == expected
    assert plain(state) == kept


@pytest.mark.parametrize("name", names_of_checks())
def test_a_check_that_is_reset_has_learned_nothing(name: str) -> None:
    """It judges whatever comes, however odd, and its state stays plain data."""
    panel = judged(checks(), range(1, 200))
    panel.start_over()
    for step, loss in enumerate([0.0, -1e30, 1e38, 1e-300, 3.0] * 20, start=200):
        panel.judge(Vitals(step, step, True, loss, abs(loss), 1e-3, lr_ratio=1.0))
    json.dumps(panel._checks[name].state_dict(), allow_nan=False)
    assert all(map(math.isfinite, panel.limits))


# ---------------------------------------------------------------------------------------------------------- remedies


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_remedy_leaves_effects_that_go_round_and_are_undone(name: str) -> None:
    """What it changes and lasts is restored from plain data in the next process; knobs are undone."""
    kind: Any = KNOWN[name]
    assert kind.__doc__
    guard, settings = handed_over(small(), cross_entropy, 12), {"of": ()} if "of" in kind.__dataclass_fields__ else {}
    controls = guard._controls
    anomaly = Anomaly(Signal.DIVERGENCE, 12, 12, 10)
    diagnosis = Diagnosis(Cause.DATA, rows=(3,), usual_rate=0.5)
    case = replace(controls.case(anomaly, diagnosis), rewinds=True)
    one = kind(**settings)
    settings |= one.settings_for(case)
    if not one.applies(case):
        return  # it is left out, and costs no strike
    before = plain(controls.effects.state_dict())
    incident = Incident(1, anomaly, diagnosis, Decision((Action(name, settings),)))
    treated = controls.apply(incident, (80, 96), 0.0, was_refused=False)
    assert (treated.rewound_to is None) == (name != "rewind")
    after = plain(controls.effects.state_dict())
    again = small()._controls
    again.effects.load_state_dict(after)
    assert plain(again.effects.state_dict()) == after | {"tick": 0}
    assert again.effects.agreed() == controls.effects.agreed()
    controls.effects.undo_to(before)
    assert plain(controls.knobs.state_dict()) == before["knobs"]


# ---------------------------------------------------------------------------------------------------------- gates


GATES: dict[str, Callable[[], Any]] = {
    "open": lambda: OpenGate(CPU, has_scale=False),
    "host": lambda: HostGate(CPU),
    "device": lambda: DeviceGate(CPU),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("loss", "norm", "lands"),
    [(1.0, 1.0, True), (-1e30, 5.0, True), (math.nan, 1.0, False), (-math.inf, 1.0, False), (1.0, math.nan, False),
     (1.0, 1e20, False), (1.0, 11.0, False)],
)  # fmt: skip
def test_a_gate_lets_an_update_land_or_leaves_no_trace(
    name: str, kind: Any, loss: float, norm: float, lands: bool
) -> None:
    """By the same limits, in the first update and in a later one. An open one lets all of them land."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.1, fused=True)
    gate = GATES[name]()

    def step(loss: float, norm: float) -> None:
        weight.grad = torch.ones(2)
        gate.limit(1e30, 10.0)
        gate.step(torch.tensor([loss, norm]), [optimizer])

    for _ in range(2):
        before = sha256([weight, dict(optimizer.state[weight])])
        step(loss, norm)
        assert (sha256([weight, dict(optimizer.state[weight])]) != before) == (lands or name == "open")
        step(1.0, 1.0)


# ---------------------------------------------------------------------------------------------------------- data


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "a data set": lambda: {"data": rows(), "batch_size": 8},
    "a data set, not shuffled": lambda: {"data": rows(), "batch_size": 8, "shuffle": False},
    "a stream": lambda: {"data": Counting(64), "batch_size": 8},
    "a loader": lambda: {"data": DataLoader(rows(), batch_size=8, shuffle=True)},  # type: ignore[arg-type]
    "a function": lambda: {"data": lambda: [torch.randn(8, 6), torch.randint(3, (8,))]},
}


def samples_of(source: str) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    return Guard(None, model, torch.optim.SGD(model.parameters(), lr=0.1), **SOURCES[source]()).samples


def taken(samples: Any, count: int) -> list[tuple[int, int, str]]:
    updates = [samples.next_update() for _ in range(count)]
    return [(one.start, one.stop, sha256(one.batches)) for one in updates]


@pytest.mark.parametrize("source", SOURCES)
def test_a_data_source_rewinds(source: str) -> None:
    """From any place that it was at the same samples follow; where an update is undone it comes again."""
    samples = samples_of(source)
    taken(samples, 2)
    state = deepcopy(samples.state_dict())
    first = taken(samples, 40)  # beyond an epoch
    samples.load_state_dict(state)
    assert taken(samples, 40) == first
    update = samples.next_update()
    samples.go_back(update)
    again = samples.next_update()
    assert (again.start, sha256(again.batches)) == (update.start, sha256(update.batches))


@pytest.mark.parametrize("source", SOURCES)
def test_a_data_source_skips_and_resumes(source: str) -> None:
    """What is skipped is left out and nothing else; another process continues at the place."""
    samples = samples_of(source)
    expected = taken(samples_of(source), 12)
    samples.skip(expected[3][0], expected[5][1])
    seen = taken(samples, 6)
    assert [one[0] for one in seen] == [one[0] for one in [*expected[:3], *expected[6:9]]]
    if source != "a function":  # which draws with the generators, whose state is the guard's
        assert seen == [*expected[:3], *expected[6:9]]
    other = samples_of(source)
    other.skip(expected[3][0], expected[5][1])
    other.load_state_dict(deepcopy(samples.state_dict()))
    assert other.position == samples.position
    if source != "a function":
        assert taken(other, 3) == expected[9:12]


# ---------------------------------------------------------------------------------------------------------- hooks


class Recorder(Hook):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_update(self) -> None:
        self.calls.append("before")

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        self.calls.append("in")
        yield
        self.calls.append("out")

    def accepted(self, update: Transaction) -> None:
        self.calls.append("accepted")


def test_a_hook_is_called_once_for_each_update() -> None:
    """Before it and around each micro-batch; after the verdict only if it was accepted."""
    guard, hook = small(accumulation=2), Recorder()
    guard._hooks = [*guard._hooks, hook]
    spoiled = iter([0] * 8 + [1] + [0] * 99)
    handed_over(guard, lambda model, batch: cross_entropy(model, batch) * (math.nan if next(spoiled) else 1.0), 10)
    guard.settle()
    assert guard.clock.tick == 11
    counts = {name: hook.calls.count(name) for name in ("before", "in", "out", "accepted")}
    assert counts["accepted"] == 10
    assert counts["in"] == counts["out"] >= 2 * guard.clock.tick  # one that is begun behind a refused one is dropped
    assert counts["before"] >= guard.clock.tick


@pytest.mark.parametrize("number", range(len(small()._hooks)))
def test_a_hook_leaves_a_healthy_run_alone(number: int) -> None:
    """No rate is changed, and the run is that without it, to the last bit."""
    guard, without = small(), small()
    assert guard._hooks[number].rate_factor() == 1.0
    without._hooks = [one for place, one in enumerate(without._hooks) if place != number]
    ended = [sha256(handed_over(one, cross_entropy, 15).state.live()["weights"]) for one in (guard, without)]
    assert ended[0] == ended[1]
