"""Scenarios: a program, what strikes it, how it is guarded, and what it comes to; a new one is one more row of a table.

What it comes to is compared with a twin in which nothing strikes. Where an update only has to leave nothing behind,
tests/core/test_guard.py has the row.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from guarded import accused, cross_entropy
from kills import kinds, summary
from safetensors.torch import load_file
from tasks import (
    BAD,
    CARRIED,
    CHANGE,
    CLASSIFY,
    EARLY,
    EXPLODES,
    FAR,
    FIT,
    FIT_MEAN,
    IN_ANOTHER_UNIT,
    NARROWS,
    NEVER,
    NO_VOLUME,
    NORMED,
    READ,
    SUMMED,
    VOLUMES,
    WEIGHED,
    Ends,
    Running,
    Scenario,
    at,
    by_count,
    by_hand,
    centred,
    chosen,
    counts,
    draw_again,
    draw_once,
    drawn,
    far_out,
    harder,
    hidden,
    inverses,
    load,
    lose_moments,
    nan_from,
    noisier,
    normalized,
    of_streamed,
    other_loss,
    plain_loss,
    raised,
    raises_once,
    readings,
    scaled_sizes,
    shares,
    shuffled_from,
    sizes,
    slow,
    spoil_statistics,
    streamed,
    stretch,
    strict,
    thrown,
    twin,
    with_a_large_target,
    with_a_rare_sensor,
    with_hidden,
    with_penalty,
    with_weights,
    with_zeros,
)

from resilient_train.data.trees import weights_sha256
from resilient_train.ground.errors import GaveUp
from resilient_train.ground.reader import MemoryConfig
from resilient_train.ground.wording import say

no_room = {"memory": MemoryConfig(every=25, keep=4, max_gib=1e-6), "disk": 25}


def unproven(recovery: str, exit_code: int, kind: str | None, verdict: str) -> Scenario:
    """The last remedy cannot show what it does before the planned end, and no state can be restored."""
    outcomes = {"skip": "unrecovered", "observe": "observed"}.get(recovery, "gave_up unrecovered recurred")
    ends = Ends(None, outcomes=outcomes, verdict=verdict, exit_code=exit_code, kind=kind)
    guard = {**no_room, "recovery": recovery}
    return Scenario(CLASSIFY._replace(steps=165), ends, shuffled_from(150), guard=guard)


on_purpose = Ends(None, outcomes="recovered recurred", verdict="well", is_touched=False, rewinds=1, says="expect=[160]")
limited = Ends(None, outcomes="recovered recurred unrecovered", first=0.1, breaks=True)

SCENARIOS: dict[str, Scenario] = {
    # A rate that leaps: the same samples at the rate of before. One that has risen for good is limited for good.
    "a hot stretch": Scenario(
        CLASSIFY._replace(steps=170),
        Ends("rate", says="jumped x100 from step 100 to 101: look at the", loss=0),
        rate=stretch(100, 100, 10),
    ),
    "a hot stretch, handed over": Scenario(
        CLASSIFY._replace(steps=140),
        Ends("rate", says="jumped x1,000 from step 40 to 41: look at the", loss=0),
        rate=stretch(1000, 40, 40),
        hands_over=True,
    ),
    "a rate that is hot from a step on": Scenario(
        CLASSIFY._replace(steps=220),
        Ends("rate", says="jumped x200 from step 120 to 121: look at the", loss=0),
        rate=stretch(200, 120, NEVER),
    ),
    "a hot stretch that is only observed": Scenario(
        CLASSIFY._replace(steps=170),
        Ends(None, outcomes="observed", verdict="observed", is_touched=False, rewinds=0),
        rate=stretch(1000, 100, 30),
        guard={"recovery": "observe"},
    ),
    # What does not return: the run ends on the best state that was proven, however much came after.
    "labels that mean nothing": Scenario(
        CLASSIFY._replace(steps=400),
        Ends(None, outcomes="gave_up unrecovered recurred", exit_code=3, loss=0),
        shuffled_from(150),
        hands_over=True,
        guard={"recovery": "conservative"},
    ),
    "losses that are NaN": Scenario(
        CLASSIFY._replace(steps=400),
        Ends(None, outcomes="gave_up unrecovered recurred", exit_code=3, loss=0),
        nan_from(150),
        hands_over=True,
    ),
    "a planned end without a way back": unproven("balanced", 3, None, "gave_up"),
    "a planned end without a way back, off": unproven("off", 3, None, "gave_up"),
    "a planned end without a way back, skip": unproven("skip", 0, "verified", "unrecovered"),
    "a planned end without a way back, observe": unproven("observe", 0, "candidate", "observed"),
    # Damage that passes. A policy that only reports waits for it.
    "a loss that jumps where the rate starts again": Scenario(
        CLASSIFY._replace(steps=300),
        Ends(None, outcomes="recovered"),
        raised(lambda tick: (200 <= tick < 212) * 3),
        rate=lambda step: 0.55 + 0.45 * math.cos(math.pi * (step % 200) / 200),
        hands_over=True,
    ),
    "a loss that jumps, skip": Scenario(
        CLASSIFY._replace(steps=300),
        Ends(None, outcomes="recovered"),
        raised(lambda tick: (150 <= tick < 162) * 3),
        hands_over=True,
        guard={"recovery": "skip"},
    ),
    "nothing is learned": Scenario(
        CLASSIFY._replace(steps=120, optimizer=partial(torch.optim.SGD, lr=1e-9)),
        Ends(verdict="no_progress"),
    ),
    # Bad rows.
    "rows far out": Scenario(CLASSIFY._replace(data=far_out), Ends("data", rows=FAR, loss=1.15), twin=CLASSIFY),
    "rows far out in the first updates": Scenario(
        WEIGHED._replace(data=partial(with_weights, EARLY)),
        Ends("data", rows=frozenset(EARLY), loss=1.15),
        twin=WEIGHED,
        guard={"shuffle": False},
    ),
    "rows whose odd field is not read": Scenario(
        WEIGHED._replace(data=partial(with_weights, EARLY), loss=cross_entropy),
        Ends(),
        guard={"shuffle": False},
    ),
    "a first loss that is far above all others": Scenario(FIT_MEAN, Ends(), guard={"shuffle": False}),
    # Damage from outside.
    "a weight that is written every fifty updates": Scenario(
        CLASSIFY._replace(steps=200),
        Ends("corruption", loss=0),
        after=lambda run: run.model.last.weight[1, 2].fill_(500.0) if run.guard.clock.tick % 50 == 40 else None,
    ),
    "lost moments": Scenario(
        CLASSIFY._replace(steps=200), Ends(None, outcomes="recovered", loss=1.15), after=at(100, lose_moments)
    ),
    "running statistics far off": Scenario(
        NORMED._replace(steps=200),
        Ends("corruption", signals="weights_jump", loss=0),
        after=at(130, spoil_statistics(1e6)),
        hands_over=True,
    ),
    "running statistics without end": Scenario(
        NORMED._replace(steps=200),
        Ends("corruption", signals="weights_jump", loss=0),
        after=at(130, spoil_statistics(1e30)),
    ),
    # What changes on purpose goes on with the configured rate and all samples; damage of that size is undone.
    "a penalty is switched on": Scenario(FIT, on_purpose._replace(rewinds=0), with_penalty),
    "another loss": Scenario(FIT, on_purpose._replace(rewinds=0), other_loss),
    "another loss, handed over": Scenario(FIT, on_purpose, other_loss, hands_over=True),
    "noisier inputs, handed over": Scenario(FIT, on_purpose, noisier, hands_over=True),
    "a penalty by a counter of the loop": Scenario(FIT, on_purpose, by_count, hands_over=True),
    "another loss that is declared": Scenario(
        FIT, Ends(verdict="well"), other_loss, hands_over=True, guard={"expect": [CHANGE]}
    ),
    "a head that is drawn again and again": Scenario(
        FIT._replace(steps=400), Ends(None, verdict="well", is_touched=False, is_accepted=True), after=draw_again
    ),
    "a head that is drawn again and again, handed over": Scenario(
        FIT._replace(steps=400),
        Ends(None, verdict="well", is_touched=False, is_accepted=True),
        after=draw_again,
        hands_over=True,
    ),
    "a head that is drawn again, which is declared": Scenario(
        FIT, Ends(), after=draw_once, hands_over=True, guard={"expect": [CHANGE]}
    ),
    "harder rows from a place on": Scenario(
        FIT._replace(data=harder, steps=128, batch_size=4), Ends(None, rows=frozenset()), guard={"shuffle": False}
    ),
    "weights that are loaded once": Scenario(slow, Ends(first=0.4), after=load(1)),
    "damage of the same size": Scenario(slow, Ends(None, loss=1.15), after=load(-1)),
    # Updates are limited where a run explodes for other reasons than its rate, with which it is trained.
    "targets in another unit": Scenario(IN_ANOTHER_UNIT, limited),
    "a loss that is a sum": Scenario(SUMMED, limited),
    "a loss that is a sum, handed over": Scenario(SUMMED, limited, hands_over=True),
    "first weights that are too large": Scenario(EXPLODES, limited),
    # What raises, and lines that rows break. A rare row is put away where the line computes of data alone: a value made
    # up there would be made-up data; else the line is patched.
    "rows that raise": Scenario(
        READ._replace(data=partial(readings, BAD)),
        Ends("data", "quarantine", "exception", rows=frozenset(BAD), says="index 7 is out of bounds"),
        guard={"shuffle": False},
    ),
    "a row that breaks a logarithm": Scenario(
        READ._replace(data=with_zeros(40), loss=sizes), Ends("data", "quarantine", rows=frozenset([40]), op="log")
    ),
    "a row that breaks an inverse": Scenario(
        READ._replace(data=with_zeros(40), loss=inverses), Ends("data", "quarantine", rows=frozenset([40]))
    ),
    "many rows that break a logarithm": Scenario(
        READ._replace(data=with_zeros(*range(0, 256, 10)), loss=sizes),
        Ends("operation", "armor", rows=frozenset(), op="log"),
    ),
    "a row that breaks a line which weights enter": Scenario(
        READ._replace(data=with_zeros(40), loss=scaled_sizes), Ends("operation", "armor", rows=frozenset(), op="log")
    ),
    "a row that raises in a backward": Scenario(
        READ._replace(data=with_a_large_target, loss=thrown), Ends("data", "quarantine", rows=frozenset([5]))
    ),
    "a row that a density cannot be asked about": Scenario(
        READ._replace(data=partial(readings, BAD), loss=counts), Ends("data", "quarantine", rows=frozenset(BAD))
    ),
    "values of the model that a density cannot be asked about": Scenario(
        READ._replace(data=partial(readings, BAD), loss=shares), Ends(None, op="log_prob")
    ),
    "a row whose values come from outside of torch": Scenario(
        READ._replace(data=with_hidden, loss=hidden), Ends(None, "quarantine", rows=frozenset([9, 77]))
    ),
    "a line that the row has passed before": Scenario(
        READ._replace(data=with_a_rare_sensor, loss=strict), Ends("data", rows=frozenset([9]))
    ),
    "batches without enough of something": Scenario(
        READ._replace(loss=chosen(by_hand, 0.7)), Ends("unknown", "skip", rows=frozenset(), op="statement")
    ),
    "batches without any": Scenario(
        READ._replace(loss=chosen(lambda some: torch.cat([one.square() for one in some]).mean(), 1.2)),
        Ends(None, op="cat"),
    ),
    "batches too small for a module": Scenario(
        READ._replace(loss=chosen(lambda some: normalized(some).square().mean(), 0.7)),
        Ends("unknown", "skip", rows=frozenset(), op="batch_norm"),
    ),
    "an error that does not come again": Scenario(READ, Ends("transient", "repeat", loss=0), raises_once(12)),
    "a stream without an index": Scenario(READ._replace(data=streamed, loss=of_streamed), Ends(None, "skip armor")),
    "a line that has no source": Scenario(VOLUMES, Ends(None, "skip quarantine", rows=frozenset(NO_VOLUME))),
    # What every batch raises is patched where a patch has a value, as weights leave the domain or from the start on.
    "a width that is learned away": Scenario(NARROWS, Ends(None, signals="exception", op="Normal")),
    "chances that are learned away": Scenario(NARROWS._replace(loss=drawn), Ends(None, op="multinomial")),
    # State that a forward writes besides the weights. The line is found though the loss meets it in a later update.
    "a buffer that is spoiled in place": Scenario(
        centred("in place"), Ends("corruption operation", op="div", outcomes="recovered")
    ),
    "a buffer that is replaced": Scenario(
        centred("replaced"), Ends("corruption operation", op="div", outcomes="recovered")
    ),
    "a state that is carried along": Scenario(CARRIED, Ends("data", rows=frozenset([37]))),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_ends_as_the_table_says(name: str, tmp_path: Path) -> None:
    """Each column of `Ends` is one fact about its incidents, what was done, or what the run has learned."""
    row = SCENARIOS[name]
    task, ends = row.task, row.ends
    run = Running(row, tmp_path / "run")
    guard, first = run.guard, run.final_loss() if ends.first is not None else 0.0
    if ends.exit_code:
        with pytest.raises(GaveUp):
            run.train()
        guard.close()
    else:
        run.train()
        assert guard.clock.step == task.steps
    met = [one for one in guard.incidents if one.diagnosis.cause != "process"]
    assert ends.causes is None or {str(one.diagnosis.cause) for one in met} == {*ends.causes.split()}
    assert ends.signals is None or {str(one.anomaly.signal) for one in met} == {*ends.signals.split()}
    done = {action.remedy for one in met for action in one.decision.actions}
    assert ends.remedies is None or done == {*ends.remedies.split()}
    assert {str(one.outcome) for one in met} <= {*ends.outcomes.split()}
    assert ends.op is None or ends.op in {one.diagnosis.culprit.op for one in met if one.diagnosis.culprit}
    if ends.rows is not None:
        rows = {*accused(met)}
        assert rows <= ends.rows
        assert len(rows) >= len(ends.rows) - len(ends.rows) // 6
    for one in met[:1]:
        assert ends.says in say(one.anomaly.evidence) + say(one.diagnosis.advice)
    assert ends.rewinds is None or sum(one.rewound_to is not None for one in met) <= ends.rewinds
    knobs = guard._controls.knobs.values
    assert not ends.is_accepted or all(one.is_accepted for one in met)
    assert ends.is_touched or (guard.samples.skipped.spans, knobs.lr, knobs.clip) == ([], 1.0, 1.0)
    written = summary(tmp_path / "run")
    assert ends.verdict in (None, written["verdict"])
    assert written["exit_code"] == ends.exit_code
    assert ends.kind in (None, kinds(tmp_path / "run").get(task.steps))
    assert ends.first is None or run.final_loss() < ends.first * first
    if ends.loss is not None:
        weights, loss = twin(row.twin or task, row.hands_over, guard.clock.step)
        if ends.loss == 0:
            assert weights_sha256(guard.state) == weights
        else:
            assert run.final_loss() < ends.loss * loss
    assert "expect" not in (row.guard or {}) or guard.clock.tick <= task.steps + 1
    if ends.breaks:
        assert not math.isfinite(plain_loss(task))
        assert done & {"limit_update", "tighten_clip"}
        assert row.hands_over or (knobs.lr, any(one.tried for one in met)) == (1.0, True)
        assert guard.clock.tick < 1.5 * task.steps
    if ends.exit_code and ends.loss == 0:  # the state that it has returned to is the one on disk
        assert guard.clock.step < 150
        (kept,) = (tmp_path / "run" / "checkpoints").iterdir()
        on_disk = load_file(kept / "weights.safetensors")
        assert all(torch.equal(on_disk[name], weight) for name, weight in run.model.named_parameters())
