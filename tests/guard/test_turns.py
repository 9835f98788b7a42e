"""Losses that are stepped in turn: each network sees the new weights of the other, and a bad turn changes neither."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pairs
import pytest
import torch
from accelerate import Accelerator
from group import agreed
from guarded import REWIND, SKIP
from pairs import BATCH_SIZE, Fault, Pair, train
from torch.nn import functional as F

from resilient_train.adapters.guard import Guard
from resilient_train.core.randomness import Seeds
from resilient_train.core.tree import sha256
from resilient_train.errors import TrainError
from resilient_train.reader import MemoryConfig

STEPS, STRUCK = 60, 30
OFTEN = MemoryConfig(every=10, keep=4, max_gib=None)
kinds = pytest.mark.parametrize("kind", ["gan", "actor"])


def pair(kind: str, *, fused: bool = True) -> Pair:
    return Pair(Accelerator(cpu=True), kind, fused=fused)


def finished(kind: str, fault: Fault | None = None, **more: Any) -> tuple[Pair, Guard]:
    trained = pair(kind)
    guard = trained.guard(**{"steps": STEPS, "memory": OFTEN, **more})
    train(trained, guard, fault)
    return trained, guard


def state_of(guard: Guard) -> str:
    """The digest of all weights, buffers and moments: a plain loop has other random numbers."""
    live = guard.state.live()
    return sha256([live["weights"], live["buffers"], live["optimizer.0"], live["optimizer.1"]])


def trained_plainly(trained: Pair, guard: Guard, batches: Iterable[Any]) -> Pair:
    """Train without a guard, on its batches and with its random numbers."""
    for number, batch in enumerate(batches):
        guard.seeds.for_update(BATCH_SIZE * number)
        trained.plain([batch])
    return trained


class Healthy(NamedTuple):
    """How a run without a fault ends."""

    digests: dict[str, str]
    state: str
    recent_loss: float | None


@cache  # for all tests that compare with it
def healthy_run(kind: str) -> Healthy:
    trained, guard = finished(kind)
    return Healthy(trained.digests(), state_of(guard), guard.recent_loss)


@cache
def state_without(kind: str, turn: int, fused: bool) -> str:
    """The state at the end of a run whose samples of this turn are left out."""
    trained = pair(kind, fused=fused)
    guard = trained.guard(steps=STEPS, recovery=SKIP, memory=OFTEN)
    guard.samples.skip(BATCH_SIZE * (turn - 1), BATCH_SIZE * turn)
    train(trained, guard)
    return state_of(guard)


@kinds
@pytest.mark.parametrize("fused", [True, False])
def test_a_healthy_run_ends_as_a_plain_loop(kind: str, fused: bool) -> None:
    """To the last bit, with the batches and the random numbers of the guard."""
    guarded = pair(kind, fused=fused)
    guard = guarded.guard(steps=STEPS, clip=None)
    batches = train(guarded, guard)
    assert (guard.clock.step, guard.clock.tick, guard.incidents) == (STEPS, STEPS, [])

    plain = trained_plainly(pair(kind, fused=fused), guard, batches)
    assert plain.digests() == guarded.digests()
    for mine, theirs in zip(guarded.bare.buffers(), plain.bare.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_sum_of_opposed_losses_need_not_fall(tmp_path: Path) -> None:
    """A healthy run is well, although its loss is not below where it began."""
    trained = pair("gan")
    guard = trained.guard(steps=STEPS, run_dir=tmp_path / "run")
    for batch in guard.batches():
        for name in trained.names:
            loss = trained.backward(name, batch, lambda loss: loss + 0.1 * guard.clock.step)
            guard.update(loss, optimizer=trained.optimizers[name])
    guard.close()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_loss"] > summary["first_loss"]
    assert summary["verdict"] == "well"


@pytest.mark.parametrize(("kind", "bad"), [("gan", 100), ("actor", None)])
def test_turns_that_are_only_observed_end_as_a_plain_loop(kind: str, bad: int | None) -> None:
    """A row of NaN lands in both networks, as it would, and is one incident."""
    guarded = pair(kind)
    if bad is not None:
        guarded.data.tensors[0][bad] = torch.nan
    guard = guarded.guard(steps=STEPS, clip=None, recovery="observe")
    batches = {sha256([*batch]): batch for batch in train(guarded, guard)}  # two come again, as they are diagnosed
    assert len(batches) == STEPS
    assert [str(one.outcome) for one in guard.incidents] == ["observed"] * (bad is not None)

    assert trained_plainly(pair(kind), guard, batches.values()).digests() == guarded.digests()


@kinds
@pytest.mark.parametrize(
    ("how", "place", "turn", "fused"),
    [
        ("loss", 0, 1, True),
        ("gradient", 1, STRUCK, True),
        ("loss", 1, STEPS, True),
        ("gradient", 0, STRUCK, False),
        ("spike", 1, 50, True),
    ],
)
def test_a_skipped_turn_is_as_if_it_had_never_been(kind: str, how: str, place: int, turn: int, fused: bool) -> None:
    """The verdict comes when the loop is in the next turn: to the last bit the run without those samples.

    A gradient a million times the usual is beyond the limit of the whole turn.
    """
    trained = pair(kind, fused=fused)
    guard = trained.guard(steps=STEPS, recovery=SKIP, memory=OFTEN)
    train(trained, guard, Fault(turn, trained.names[place], how))
    (incident,) = guard.incidents
    signals = {"loss": ["nonfinite_loss"], "gradient": ["nonfinite_grad"], "spike": ["grad_spike", "loss_spike"]}
    assert incident.anomaly.signal in signals[how]
    assert (incident.anomaly.step, guard.clock.tick) == (turn, STEPS + 1)
    assert state_of(guard) == state_without(kind, turn, fused)


@pytest.mark.parametrize(("kind", "place", "turn"), [("gan", 1, STEPS), ("actor", 1, 10)])
def test_an_overflow_of_the_loss_scale_leaves_the_turn_out(kind: str, place: int, turn: int) -> None:
    """Without an incident. The scale halves once, and all else is as if those samples were skipped."""
    assert scaled(kind, turn, pair(kind).names[place]) == scaled(kind, turn)


@cache
def scaled(kind: str, turn: int, overflows: str = "") -> str:
    """The state at the end of a run with a loss scale, in which a turn overflows, or is left out."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=10**6)
    trained = Pair(accelerator, kind)
    guard = trained.guard(steps=STEPS, recovery=SKIP)
    if not overflows:
        guard.samples.skip(BATCH_SIZE * (turn - 1), BATCH_SIZE * turn)
    train(trained, guard, Fault(turn, overflows, "gradient") if overflows else None)
    assert (guard.clock.step, guard.incidents) == (STEPS, [])
    assert accelerator.scaler.get_scale() == 2.0 ** (15 if overflows else 16)
    return state_of(guard)


@pytest.mark.parametrize(("kind", "recovery", "place"), [("actor", REWIND, 1), ("gan", "balanced", 1)])
def test_a_rewind_takes_both_networks_back(kind: str, recovery: Any, place: int) -> None:
    """A fault that does not come again: the run ends as the healthy one, or on other samples just as well."""
    healthy = healthy_run(kind)
    _, guard = finished(kind, Fault(STRUCK + 5, pair(kind).names[place], "loss"), recovery=recovery)
    (incident,) = guard.incidents
    assert guard.clock.step == STEPS
    if recovery == REWIND:
        assert incident.rewound_to is not None
        assert state_of(guard) == healthy.state
    assert guard.recent_loss == pytest.approx(healthy.recent_loss, abs=0.1)


@kinds
def test_a_loop_that_is_left_within_a_turn_undoes_it(kind: str) -> None:
    """And makes it when it is entered again."""
    healthy = healthy_run(kind)
    left = pair(kind)
    guard = left.guard(steps=STEPS, memory=OFTEN)
    for turn, batch in enumerate(guard.batches(), start=1):
        before = left.digests()
        loss = left.backward(left.names[0], batch)
        guard.update(loss, optimizer=left.optimizers[left.names[0]])
        if turn == STRUCK:
            assert left.digests()[left.names[0]] != before[left.names[0]]
            break
        loss = left.backward(left.names[1], batch)
        guard.update(loss, optimizer=left.optimizers[left.names[1]])
    train(left, guard)
    assert (guard.clock.tick, left.digests()) == (STEPS, healthy.digests)


def test_a_run_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """Stopped between two turns, and completed by other objects: as the run that was not stopped."""
    more: dict[str, Any] = {"steps": STEPS, "memory": OFTEN, "run_dir": tmp_path / "run", "disk": 10, "resume": True}
    first = pair("gan")
    guard: Guard = first.guard(**more, stop=lambda: guard.clock.step >= STRUCK)
    train(first, guard)
    assert guard.stopped
    guard.leave()
    guard.close()
    second = pair("gan")
    guard = second.guard(**more)
    train(second, guard)
    assert second.digests() == healthy_run("gan").digests
    guard.close()


def test_each_network_has_its_gradients_clipped_alone() -> None:
    """As `clip_grad_norm_` before each step does, and no scan takes that for damage."""
    clipped, norm = pair("actor"), 1e-2
    guard = clipped.guard(steps=2 * STEPS, clip=norm)
    batches = train(clipped, guard)
    assert guard.incidents == []
    plain = pair("actor")
    for batch in batches:
        for name in plain.names:
            plain.backward(name, batch)
            torch.nn.utils.clip_grad_norm_(plain.bare[name].parameters(), norm)
            plain.optimizers[name].step()
    for mine, theirs in zip(clipped.bare.parameters(), plain.bare.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


Calls = list[tuple[str, str | None]]  # the loss of which network, and the optimizer that steps with it
FIRST = ("critic", "critic")


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ([("critic", "unknown")], r"does not know this optimizer, .*SGD: give Guard a list of all optimizers"),
        ([FIRST, ("actor", None)], "called twice for one batch"),
        ([("actor", None), FIRST], "called twice for one batch"),
        ([FIRST, ("no backward", "actor")], "no weight has a gradient"),
    ],
)
def test_a_mistake_is_told_in_one_line(calls: Calls, line: str) -> None:
    """Where it is made; the networks are whole when the guard is closed."""
    made = pair("actor")
    guard = made.guard(steps=STEPS)
    before = made.digests()
    optimizers = {**made.optimizers, "unknown": torch.optim.SGD(made.bare.parameters())}
    with pytest.raises(TrainError, match=line) as raised:
        every_batch(calls, made, guard, optimizers)
    assert "\n" not in str(raised.value)
    guard.close()
    assert calls[0][1] is None or made.digests() == before  # there, a whole update was made before


def every_batch(calls: Calls, made: Pair, guard: Guard, optimizers: dict[str, Any]) -> None:
    for batch in guard.batches():
        for name, optimizer in calls:
            is_computed = name in made.names
            loss = made.backward(name, batch) if is_computed else made.loss("critic", batch)
            guard.update(loss, **({} if optimizer is None else {"optimizer": optimizers[optimizer]}))


@pytest.mark.parametrize(
    ("accumulation", "objective", "line"),
    [
        (2, None, "cannot accumulate gradients: set gradient_accumulation_steps to 1"),
        (1, lambda model, batch: model(batch), "leave out objective="),
    ],
)
def test_what_cannot_be_stepped_in_turn_is_refused(accumulation: int, objective: Any, line: str) -> None:
    """In one line, at the first loss."""
    made = Pair(Accelerator(cpu=True, gradient_accumulation_steps=accumulation), "actor")
    guard = made.guard(steps=STEPS, objective=objective)
    with pytest.raises(TrainError, match=line):
        every_batch([FIRST], made, guard, dict(made.optimizers))


def test_optimizers_may_be_those_that_accelerate_has_wrapped() -> None:
    """In any order, and another one in every turn."""
    made = pair("actor")
    wrapped = {name: made.accelerator.prepare(one) for name, one in made.optimizers.items()}
    guard = Guard(made.accelerator, made.nets, list(wrapped.values()), data=made.data, batch_size=8, steps=20)
    for turn, batch in enumerate(guard.batches()):
        for name in made.names[:: 1 if turn % 2 else -1]:
            guard.update(made.backward(name, batch), optimizer=wrapped[name])
    assert (guard.clock.step, guard.incidents) == (20, [])


def test_two_ranks_train_as_a_plain_loop_does() -> None:
    """Each network in a DDP of its own, under the names that it has in one process."""
    one = agreed(2, pairs.on_a_rank, "actor", None, 30, {})
    assert one["tick"] == 30
    assert sorted(one["names"]) == sorted(name for name, _ in pair("actor").bare.named_parameters())
    assert one["plain"] == one["digests"]


@pytest.mark.parametrize(("kind", "place", "how"), [("gan", 1, "loss"), ("actor", 0, "gradient")])
def test_two_ranks_refuse_the_same_turn(kind: str, place: int, how: str) -> None:
    """A fault of rank 1 alone: neither network of either rank keeps half of it."""
    fault = Fault(15, pair(kind).names[place], how, rank=1)
    one = agreed(2, pairs.on_a_rank, kind, fault, 20, {"recovery": SKIP})
    assert one["tick"] == 21
    assert one["ranks"] == ([(1,)] if how == "loss" else [()])


def shared(fault_at: int = 0, how: str = "loss", **more: Any) -> tuple[Pair, Guard | None]:
    """Train a GAN as most programs do: the generator runs once in a turn, and both losses use what it made."""
    trained, guard = pair("gan"), None
    generator, discriminator = trained.nets["g"], trained.nets["d"]
    if more:
        guard = trained.guard(steps=STEPS, memory=OFTEN, clip=None, **{"recovery": SKIP, **more})
    seeds = Seeds(0, 0, torch.device("cpu"))
    batches: Any = guard.batches() if guard else DRAWN
    for turn, (pictures, noise) in enumerate(batches, start=1):
        if guard:
            DRAWN.append((pictures, noise))
        else:
            seeds.for_update((turn - 1) * BATCH_SIZE)
        made = generator(noise)
        for name in trained.names:
            target = made.detach() if name == "d" else made
            loss = F.softplus((1 if name == "d" else -1) * discriminator(target)).mean()
            if name == "d":
                loss = loss + F.softplus(-discriminator(pictures)).mean()
            loss = pairs.SPOILED[how](loss) if turn == fault_at and name == "g" else loss
            trained.optimizers[name].zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if guard:
                guard.update(loss, optimizer=trained.optimizers[name])
            else:
                trained.optimizers[name].step()
    return trained, guard


DRAWN: list[Any] = []  # the batches of the guarded loop


def test_losses_may_share_a_forward() -> None:
    """Although a scan, between the two losses, looks at the buffers as they were before that forward."""
    DRAWN.clear()
    guarded, guard = shared(recovery="balanced")
    assert guard is not None
    assert guard.incidents == []
    plain, _ = shared()
    assert plain.digests() == guarded.digests()


@pytest.mark.parametrize("recovery", [SKIP, REWIND])
def test_a_turn_that_is_dropped_may_share_a_forward(recovery: Any) -> None:
    """Its other loss is computed with weights that were restored in between: that is ignored, and raises no error."""
    trained, guard = shared(STRUCK, recovery=recovery)
    assert guard is not None
    [incident] = guard.incidents
    assert incident.anomaly.step == STRUCK
    assert guard.clock.step == STEPS
    assert all(bool(one.isfinite().all()) for one in trained.nets.parameters())


CRITICS = 5  # steps of the critic for one of the other network, which steps with every second batch only
Struck = tuple[int, int, str]  # the batch, the step in it, and how


def train_wgan(
    trained: Pair,
    batches: Iterable[Any],
    update: Callable[[str, Any], object],
    at: Struck | None = None,
    left_out: int = 0,
) -> None:
    """Train as WGANs do: `update` takes the name of a network and its loss; what is struck `at` a place is spoiled."""
    numbers = (number for number in itertools.count(1) if number != left_out)
    for turn, batch in zip(numbers, batches, strict=False):
        for number in range(CRITICS + (turn % 2 == 0)):
            name = trained.names[number == CRITICS]
            spoil = pairs.SPOILED[at[2]] if at is not None and (turn, number) == at[:2] else lambda loss: loss
            update(name, trained.backward(name, batch, spoil))


@kinds
@pytest.mark.parametrize("fused", [True, False])
def test_the_critic_may_step_five_times(kind: str, fused: bool) -> None:
    """And the other network not at all: to the last bit as a plain loop."""
    guarded, results, drawn = pair(kind, fused=fused), list[bool](), list[Any]()
    guard = guarded.guard(steps=STEPS, clip=None)

    def recorded() -> Iterable[Any]:
        for batch in guard.batches():
            drawn.append(batch)
            yield batch

    def update(name: str, loss: Any) -> None:
        results.append(bool(guard.update(loss, optimizer=guarded.optimizers[name])))

    train_wgan(guarded, recorded(), update)
    assert (guard.clock.step, guard.clock.tick, guard.incidents) == (STEPS, STEPS, [])
    assert results == ([False] * 2 * CRITICS + [True]) * (STEPS // 2)

    plain = pair(kind, fused=fused)

    def seeded() -> Iterable[Any]:
        for number, batch in enumerate(drawn):
            guard.seeds.for_update(BATCH_SIZE * number)
            yield batch

    train_wgan(plain, seeded(), lambda name, loss: plain.optimizers[name].step())
    assert plain.digests() == guarded.digests()


@kinds
@pytest.mark.parametrize(("number", "how"), [(0, "loss"), (3, "gradient"), (CRITICS, "loss"), (CRITICS, "spike")])
def test_a_bad_step_undoes_all_of_the_update(kind: str, number: int, how: str) -> None:
    """To the last bit the run without those samples."""

    def ended(at: Struck | None) -> tuple[str, Guard]:
        trained = pair(kind)
        guard = trained.guard(steps=STEPS, recovery=SKIP, memory=OFTEN)
        if at is None:
            guard.samples.skip(BATCH_SIZE * (STRUCK - 1), BATCH_SIZE * STRUCK)

        def update(name: str, loss: Any) -> None:
            guard.update(loss, optimizer=trained.optimizers[name])

        train_wgan(trained, guard.batches(), update, at, left_out=0 if at else STRUCK)
        return state_of(guard), guard

    state, guard = ended((STRUCK, number, how))
    [incident] = guard.incidents
    assert (incident.anomaly.step, guard.clock.tick) == (STRUCK, STEPS + 1)
    assert state == ended(None)[0]


@pytest.mark.parametrize(
    ("at", "scale"), [(None, 2.0**17), ((3, 0, "gradient"), 2.0**15), ((3, 4, "gradient"), 2.0**15)]
)
def test_the_loss_scale_follows_updates_and_not_their_steps(at: Struck | None, scale: float) -> None:
    """An overflow of any step halves it, and leaves the update out; twenty updates without one double it."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=20)
    trained = Pair(accelerator, "actor")
    guard = trained.guard(steps=21, recovery=SKIP)

    def update(name: str, loss: Any) -> None:
        guard.update(loss, optimizer=trained.optimizers[name])

    train_wgan(trained, guard.batches(), update, at)
    assert (guard.clock.step, guard.incidents) == (21, [])
    assert guard.clock.tick == 21 + (at is not None)
    assert accelerator.scaler.get_scale() == scale


@pytest.mark.parametrize("bad", [0, 3, 4, 7])
def test_losses_of_all_may_alternate_with_losses_in_turn(bad: int) -> None:
    """Also where the verdict on the one comes in the middle of the other."""
    made = pair("actor")
    guard = made.guard(steps=STEPS, recovery=SKIP)
    for number, batch in enumerate(guard.batches(), start=1):
        spoil = pairs.SPOILED["loss"] if number == bad else lambda loss: loss
        if number % 8 < 4:  # three of the one, four of the other
            guard.update(made.backward("critic", batch, spoil))
        else:
            for name in made.names:
                guard.update(made.backward(name, batch, spoil), optimizer=made.optimizers[name])
    assert (guard.clock.step, len(guard.incidents)) == (STEPS, bool(bad))
    guard.close()


def test_the_updates_of_a_loop_that_accumulates_by_itself_may_be_turns() -> None:
    made = pair("actor")
    guard = made.guard(steps=5)
    for update in guard.updates():
        for batch in update:
            for name in made.names:
                guard.update(made.backward(name, batch), optimizer=made.optimizers[name])
    assert guard.clock.step == 5
