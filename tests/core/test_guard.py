"""The public guard, with the remedies of the core alone; a new row of SCENARIOS is a new specification."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from group import alone, together
from guarded import REWIND, At, adamw, guarded, handed_over, is_finite, often
from programs import (
    OPTIMIZERS,
    STEPS,
    Fault,
    Program,
    Scenario,
    Shared,
    Signed,
    Turns,
    both_ways,
    ends_as_its_plain_loop,
    of,
)
from programs import guarded as guarded_program
from torch import nn, optim

from resilient_train.ground.errors import GaveUp
from resilient_train.ground.reader import MemoryConfig
from resilient_train.loop.guard import Guard


def no_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


unfused, average = of(optim.AdamW), partial(Program, has_average=True)
thirds, scaled = partial(Program, accumulate=3), partial(Program, scale=2.0**10)
rewinds: dict[str, Any] = {"recovery": REWIND, "memory": often(5), "verify_after": 3}
observes = {"recovery": {"ladders": {"default": []}, "observe": True}}
five = {"times": 5, "every": 2}
TURNS: dict[str, tuple[dict[str, Any], Fault | None]] = {
    "nothing strikes": ({}, None),
    "nothing strikes, not fused": ({"fused": False}, None),
    "NaN loss in the first turn": ({}, Fault("loss", 1, 1)),
    "NaN gradient in the second step": ({}, Fault("gradient", 30, 2)),
    "NaN gradient, not fused": ({"fused": False}, Fault("gradient", 30, 1)),
    "NaN loss in the last turn": ({}, Fault("loss", STEPS, 2)),
    "gradient far beyond the usual": ({}, Fault("spike", 35, 2)),
    # The critic steps five times, the other network in every second turn only.
    "five steps": (five, None),
    "five steps, not fused": ({**five, "fused": False}, None),
    "five steps, NaN loss in the first": (five, Fault("loss", 30, 1)),
    "five steps, NaN gradient in the fourth": (five, Fault("gradient", 30, 4)),
    "five steps, NaN loss in the one after them": (five, Fault("loss", 30, 6)),
    "five steps, gradient far beyond the usual": (five, Fault("spike", 36, 6)),
}

SCENARIOS: dict[str, Scenario] = {
    "nothing strikes": Scenario(Program),
    # A refused update leaves nothing behind, whatever the optimizer, with or without state.
    **{
        f"{one}, update {at}": Scenario(partial(Program, build), Fault("gradient", at))
        for one, build in OPTIMIZERS.items()
        for at in (1, 9)
    },
    # BatchNorm has seen it. With a fused optimizer the verdict comes an update late.
    "NaN row, the host waits": Scenario(partial(Program, unfused), Fault("row", 9)),
    "NaN row, the device decides": Scenario(Program, Fault("row", 9)),
    "NaN row, a user's own optimizer": Scenario(partial(Program, of(Signed)), Fault("row", 9)),
    "NaN row in the first update": Scenario(Program, Fault("row", 1)),
    "NaN row in the last update": Scenario(Program, Fault("row", STEPS)),
    "NaN loss": Scenario(Program, Fault("loss", 2)),
    "gradient far beyond the usual": Scenario(Program, Fault("spike", 35)),
    # A policy that only observes: the run ends as a plain loop does that is struck as well.
    "observed: nothing strikes": Scenario(Program, guard=observes),
    "observed: NaN row": Scenario(Program, Fault("row", 12), observes, left_out=False),
    "observed: NaN row, losses in turn": Scenario(partial(Turns, "gan"), Fault("row", 12), observes, left_out=False),
    "observed: NaN gradient in the first update": Scenario(Program, Fault("gradient", 1), observes, left_out=False),
    "observed: NaN loss in the last update": Scenario(Program, Fault("loss", STEPS), observes, left_out=False),
    "observed: loss far beyond the usual": Scenario(Program, Fault("spike", 35), observes, left_out=False),
    "observed: bit flip": Scenario(Program, Fault("bit", 22), observes, left_out=False),
    # Weights that are written outside of an update: the losses show it, and a rewind repeats what was undone exactly.
    "bit flip": Scenario(Program, Fault("bit", 22), rewinds, left_out=False),
    "weights that are suddenly others": Scenario(Program, Fault("drift", 22), rewinds, left_out=False),
    # Gradient accumulation: what a part of an update has left does not leak into the next one.
    "NaN row in the second third": Scenario(thirds, Fault("row", 9, 2)),
    "NaN in the second third, the host waits": Scenario(partial(thirds, unfused), Fault("loss", 9, 2)),
    "loop left in the second third": Scenario(thirds, Fault("left", 9, 2), left_out=False),
    # Loss scales.
    "float16 overflows until the scale fits": Scenario(partial(Program, scale=2.0**24, has_half=True, net=no_norm)),
    "overflow with BatchNorm": Scenario(scaled, Fault("overflow", 10)),
    "overflow in the last update": Scenario(scaled, Fault("overflow", STEPS)),
    "NaN loss with a scale": Scenario(scaled, Fault("loss", 10)),
    # What the loop keeps.
    "average, NaN row": Scenario(average, Fault("row", 23)),
    "average, rewind": Scenario(average, Fault("loss", 23), rewinds, left_out=False),
    # Losses in turn: a bad one undoes the whole turn.
    **{f"actor: {what}": Scenario(partial(Turns, "actor", **made), fault) for what, (made, fault) in TURNS.items()},
    "gan: nothing strikes": Scenario(partial(Turns, "gan")),
    "gan: NaN loss in the first turn": Scenario(partial(Turns, "gan"), Fault("loss", 1, 1)),
    "gan: NaN gradient, not fused": Scenario(partial(Turns, "gan", fused=False), Fault("gradient", 30, 1)),
    "gan: NaN loss in the last turn": Scenario(partial(Turns, "gan"), Fault("loss", STEPS, 2)),
    "gan: five steps and one": Scenario(partial(Turns, "gan", 5)),
    "gan: five steps and one, NaN loss in the third": Scenario(partial(Turns, "gan", 5), Fault("loss", 30, 3)),
    "actor: rewind": Scenario(partial(Turns, "actor"), Fault("loss", 35, 2), rewinds, left_out=False),
    "gan: rewind": Scenario(partial(Turns, "gan", 5), Fault("loss", 34, 4), rewinds, left_out=False),
    "actor: loop left within a turn": Scenario(partial(Turns, "actor"), Fault("left", 30, 2), left_out=False),
    "gan: loop left within a turn": Scenario(partial(Turns, "gan"), Fault("left", 30, 2), left_out=False),
    "actor: overflow": Scenario(partial(Turns, "actor", scale=2.0**16), Fault("overflow", 10, 2)),
    "gan: overflow in the last turn": Scenario(partial(Turns, "gan", scale=2.0**16), Fault("overflow", STEPS, 2)),
    "actor: each network is clipped alone": Scenario(partial(Turns, "actor", clip=0.01)),
    "gan that shares a forward: nothing strikes": Scenario(partial(Shared, "gan")),
    "gan that shares a forward: skip": Scenario(partial(Shared, "gan"), Fault("loss", 30, 2)),
    "gan that shares a forward: rewind": Scenario(
        partial(Shared, "gan"), Fault("loss", 30, 2), rewinds, left_out=False
    ),
    # Ranks. A NaN in a gradient is on all of them.
    "two ranks: nothing strikes": Scenario(Program, ranks=2),
    "two ranks: NaN row on one": Scenario(Program, Fault("row", 20, rank=1), ranks=2),
    "two ranks: actor": Scenario(partial(Turns, "actor"), ranks=2),
    "two ranks: actor, NaN gradient on one": Scenario(partial(Turns, "actor"), Fault("gradient", 15, 1, 1), ranks=2),
    "two ranks: gan, NaN loss on one": Scenario(partial(Turns, "gan"), Fault("loss", 15, 2, 1), ranks=2),
    # A process that is killed, and another one that resumes the run.
    "killed": Scenario(Program, killed=23),
    "average, NaN row, killed": Scenario(average, Fault("row", 12), killed=23),
    "accumulation and a scale, killed": Scenario(partial(thirds, scale=2.0**10), killed=23),
    "actor: killed": Scenario(partial(Turns, "actor"), killed=23),
}


EACH_KIND = {  # those that need no other process
    "nothing strikes",
    "NaN row, the device decides",
    "observed: NaN row",
    "bit flip",
    "loop left in the second third",
    "overflow with BatchNorm",
    "average, rewind",
    "gan: NaN loss in the last turn",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.each_kind] * (name in EACH_KIND)) for name in SCENARIOS]
)
def test_a_scenario_ends_as_its_plain_loop(name: str, tmp_path: Path) -> None:
    """To the last bit, after one incident of its kind, or none; each rank has the buffers of its own rows."""
    row = SCENARIOS[name]
    if row.killed:
        assert alone(killed, name, tmp_path)[0] == -signal.SIGKILL
    ended = (
        together(row.ranks, on_a_rank, name)
        if row.ranks > 1
        else [(0, both_ways(row, (row.killed and tmp_path) or None))]
    )
    ends_as_its_plain_loop(row, ended)


def on_a_rank(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return both_ways(SCENARIOS[name])


def killed(name: str, run_dir: Path) -> None:
    guarded_program(SCENARIOS[name], 0, run_dir, is_killed=True)


def test_the_verdict_is_in_before_the_next_update_lands() -> None:
    """It may come an update late, and what was begun meanwhile does not land."""
    guard, spoiled = guarded(adamw, None), At("gradient", 5)
    landed = []
    for batch in guard.batches(8):
        guard.world.accelerator.backward(loss := spoiled(guard.model, batch))
        landed.append(bool(guard.update(loss)))
    assert landed.count(False) == 1
    assert landed.index(False) == 5  # the sixth was begun on the strength of the fifth
    assert guard.clock.step == 8


def test_a_snapshot_is_nothing_to_go_back_to_until_it_is_proven() -> None:
    """By healthy updates after it; also in a loop that is left, right after one was taken, and entered again."""
    guard = handed_over(guarded(adamw, None, memory=often(5)), At("none"), 12)
    assert [one.step for one in guard._ring.snapshots if not one.verified] == [5, 10]
    assert [one.step for one in guard._ring.verified_until(guard.clock.step)] == [0]
    guard = guarded(adamw, None, memory=MemoryConfig(every=5, keep=3, max_gib=None))
    for stop, steps in ((10, 200), (10**6, 40)):
        for batch in guard.batches(steps):
            if guard.attempted_step == stop:
                break
            guard.world.accelerator.backward(loss := At("none")(guard.model, batch))
            guard.update(loss)
    guard.settle()
    assert all(held.verified for held in guard._ring.snapshots if held.step <= 15)
    assert all(held.checks_state is not None for held in guard._ring.snapshots if held.step < guard.clock.step)


@pytest.mark.parametrize(
    ("how", "ladder", "actions"),
    [
        ("loss", [{"do": ["repeat"], "strikes": 3}], ["repeat"] * 3),
        ("loss", [["repeat"], ["rewind", {"lower_lr": {"factor": 0.5}}, "tighten_clip"]], ["repeat", "rewind"]),
        ("batch", [], []),
    ],
)
def test_a_fault_in_every_update_ends_the_run(how: str, ladder: list[Any], actions: list[str], tmp_path: Path) -> None:
    """It gives up with code 3 once its ladder is exhausted, on the newest state that was proven, which is on disk."""
    policy = {"ladders": {"default": ladder}}
    guard = guarded(adamw, None, recovery=policy, memory=often(5), verify_after=3, run_dir=tmp_path)
    with pytest.raises(GaveUp) as error:
        handed_over(guard, At(how, *range(31, 99)), 60)
    assert [one.decision.actions[0].remedy for one in guard.incidents if one.decision.actions] == actions
    assert error.value.exit_code == 3
    assert guard.clock.step in (20, 25)  # where the state is scanned as well, its proof takes longer
    assert error.value.last_good is not None
    assert error.value.last_good.name == f"step-{guard.clock.step:08}"
    assert is_finite(guard.state.model)


def test_knobs_that_a_remedy_turned_shape_the_updates() -> None:
    """The rate and the clip of every update from then on are the configured ones times the knobs."""
    turns = ["rewind", {"lower_lr": {"factor": 0.25}}, {"tighten_clip": {"factor": 0.5}}]
    groups = []
    for at in (20, 0):
        guard = guarded(adamw, None, recovery={"ladders": {"default": [turns]}}, memory=often(5), verify_after=3)
        handed_over(guard, At("loss", at), 30)
        assert len(guard.incidents) == bool(at)
        groups.append(guard.state.optimizers[0].param_groups[0])
        knobs = guard._controls.knobs
        assert (knobs.rate, knobs.clip) == ((0.25, 0.5) if at else (1.0, 1.0))
    turned, usual = groups
    assert turned["lr"] == pytest.approx(0.25 * usual["lr"])


def test_what_a_remedy_turned_outlives_the_process(tmp_path: Path) -> None:
    """A run that is asked to stop leaves its newest state, and the next process continues there with the knobs."""
    turns = {"ladders": {"default": [["rewind", {"lower_lr": {"factor": 0.25}}]]}}
    on_disk: dict[str, Any] = {"run_dir": tmp_path, "resume": True, "disk": 5}
    more = {"recovery": turns, "memory": often(5), "verify_after": 3, **on_disk}
    first: Guard = guarded(adamw, None, stop=lambda: first.clock.step >= 30, **more)
    handed_over(first, At("loss", 20), 40)
    assert first.stopped
    assert first.leave() is not None
    first.close()
    second = guarded(adamw, None, **more)
    assert second.resume()
    assert (second.clock.step, second._controls.knobs.rate) == (first.clock.step, 0.25)
    handed_over(second, At("none"), 40)
    assert (second.clock.step, second._controls.knobs.rate) == (40, 0.25)
