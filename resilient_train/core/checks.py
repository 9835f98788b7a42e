"""All checks together: judge the vitals of one update after the other. Pure, and free of torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any, ClassVar

from resilient_train.core.episode import Episode, Reference, ReferenceConfig, Standing
from resilient_train.core.limit import GradLimit, LimitConfig, Refusals, loss_limit
from resilient_train.core.loss import Alarm, Jump, JumpConfig, Level, PlainState, load, plain
from resilient_train.ground.types import LARGEST_NORM, NO_LIMIT, SPIKES, Anomaly, Facts, Signal, Vitals, fact
from resilient_train.ground.wording import log

REMEMBERED = 10_000  # updates: further back than the memory snapshots of a run reach
IN_CHECKPOINT = 2048  # updates
_AROUND = 2  # steps before and after a declared change without alarms


References = Callable[[int], Reference | None]  # the losses up to a step, to compare others with


@dataclass
class ChecksConfig:
    """The settings of the checks; further ones are added to them."""

    limit: LimitConfig
    jump: JumpConfig
    probation: ReferenceConfig
    expect: list[int]  # steps around which the loss changes on purpose


@dataclass(frozen=True, slots=True)
class Finding:
    """What the checks say about one update."""

    anomaly: Anomaly | None = None
    repeat: bool = False  # the limit was too low: retry the update with the raised limit


class Check(PlainState):
    """A further check. What a class leaves out says nothing; its alarm is a divergence."""

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        """Judge an accepted update. Not `is_learned`: damage is open, its loss above the level to return to."""
        return None

    def overflowed(self, vitals: Vitals) -> Facts | None:
        """Note an update that the loss scale refused. Returns evidence if that is no ordinary overflow."""
        return None

    def trusted(self, then: Reference, since: int) -> int:
        """Return the newest step to trust, at most `since`, where the losses were as `then` says."""
        return since

    def lifts_limits(self, step: int) -> bool:
        """Say whether all of the update to this step is to be seen."""
        return False

    def rate_factor(self, step: int) -> float:
        """Return what an experiment multiplies the rate of the update to this step by."""
        return 1.0

    def more_is_trained(self) -> None:
        """Note that weights were added or unfrozen."""

    def forget(self, limit: float = inf) -> None:
        """Learn from scratch: a run that does not come below the `limit` has not learned what is new."""


class Checks:
    """Judges every attempted update, in order, and sets the limits for the next one.

    What the checks learn from accepted updates rewinds with the run; refusals and declared changes do not. From damage
    on, until the loss is back at its reference, nothing is learned from losses above that.
    """

    persistent = ("is_changed", "nan_is_usual", "declared")
    records: ClassVar = dict[str, Any]()

    def __init__(self, config: ChecksConfig, level: Level | None = None, **more: Check) -> None:
        """`more` are further checks by their names in checkpoints, which judge in this order."""
        self.config = config
        self.level = level or Level(config.jump)
        self.grad_limit = GradLimit(config.limit)
        self.jump = Jump(config.jump, self.level)
        self.episode = Episode(config.probation)
        self.refusals = Refusals(config.limit)
        own = {name: one for name, one in vars(self).items() if isinstance(one, PlainState)}
        self.more, self._more, self._checks = more, list(more.values()), {**own, **more}
        self._lasting = {name: one for name, one in self._checks.items() if one.persistent and one != self.episode}
        # Loss and gradient norm of accepted updates, by step. Of a dict, the first entry is slow to find and remove.
        self._accepted = OrderedDict[int, tuple[float, float]]()
        self.is_changed = False  # what is usual was learned again: the beginning of the run is no measure any more
        self.nan_is_usual = False  # healthy batches hold values that are not finite, such as masks
        self.declared: set[int] = set()  # steps without alarms
        self._unowned: dict[str, Any] = {}  # lasting state of checks that are not there any more
        self._step = 0  # of the newest update
        for step in config.expect:
            self.expect(step)

    @property
    def limits(self) -> tuple[float, float]:
        """The limits for the loss and the gradient norm, exact in float32."""
        if any(check.lifts_limits(self._step + 1) for check in self._more):
            return NO_LIMIT, NO_LIMIT
        return loss_limit(self.config.limit, self.level), self.grad_limit.limit

    @property
    def usual_norm(self) -> float | None:
        """The norm of the largest gradient lately, or of the first one; None if it is not known."""
        if self.grad_limit.is_warm:
            return self.grad_limit.largest
        return next((norm for _, norm in self._accepted.values()), None)

    def rate_factor(self, step: int) -> float:
        return prod(check.rate_factor(step) for check in self._more)

    def expect(self, step: int) -> None:
        self.declared.update(range(step - _AROUND, step + _AROUND + 1))

    def more_is_trained(self, step: int) -> None:
        self.declared.update(range(step, step + _AROUND + 1))  # a run that was rewound comes to it again
        for check in self._more:
            check.more_is_trained()

    def require_recovery(self, since: int, step: int, *, is_only_reported: bool = False) -> None:
        """Compare the run with its losses up to `since`: damage came after that and was noticed at `step`."""
        if self.config.probation.every:
            self.episode.begin(self._reference_at(since), step, since, is_only_reported=is_only_reported)

    def _reference(self, until: int) -> Reference | None:
        return Reference.of({step: loss for step, (loss, _) in self._accepted.items()}, until, self.level.scale)

    def _reference_at(self, step: int) -> Reference | None:
        # The loss of the next step was computed with the weights of this one: use it if there is no earlier loss.
        return self._reference(step) or self._reference(step + 1)

    def level_at(self, step: int) -> float | None:
        known = self._reference_at(step)
        return known.level if known else None

    def rewound(self, step: int, since: int, rate: float = 1.0) -> None:
        """Note a rewind to `step`, whose state was loaded before; the learning rate is multiplied by `rate` from here.

        What was measured up to `since`, or an older reference, stays: back at its start, a run would learn any loss.
        """
        reference = self.episode.reference
        trusted = since if reference is None else max(since, reference.step)
        self._accepted = OrderedDict((other, one) for other, one in self._accepted.items() if other <= trusted)
        self._step = step
        self.episode.rewound(step, {other: loss for other, (loss, _) in self._accepted.items()}, rate)

    def judge(self, vitals: Vitals) -> Finding:
        self._step = vitals.step
        finding = self._judge(vitals)
        anomaly, is_new = finding.anomaly, not self.episode.is_open
        if anomaly is not None and anomaly.landed and (is_new or anomaly.signal is not Signal.NOT_RECOVERED):
            # New damage counts as only reported, until the policy has done something about it.
            self.require_recovery(anomaly.since, anomaly.step, is_only_reported=is_new or self.episode.is_only_reported)
        return finding

    def _judge(self, vitals: Vitals) -> Finding:
        if vitals.overflowed:
            found = [check.overflowed(vitals) for check in self._more]
            if evidence := next(filter(None, found), None):
                # Nothing landed, but the loss scale is part of the state, and the newest weights may be what overflows.
                place = vitals.step + 1, vitals.tick, max(0, vitals.step - 1)
                return Finding(Anomaly(Signal.SCALE_COLLAPSE, *place, evidence, ranks=vitals.ranks))
            return Finding()
        step = vitals.step + (not vitals.accepted)
        spike = vitals.refused if vitals.refused in SPIKES else None
        if vitals.refused is not None and spike is None:
            return _refused(vitals, vitals.refused, _measured(vitals))
        if step in self.declared:  # a reference from after it still holds: a rewind may cross it again
            self.start_over(ends_episode=self.episode.reference is None or self.episode.reference.step <= step)
            if spike is not None and vitals.grad_norm > LARGEST_NORM:  # no limit allows it
                return _refused(vitals, spike, _measured(vitals))
            return Finding(repeat=spike is not None)
        return Finding(self._judge_landed(vitals)) if spike is None else self._judge_refused(vitals, spike)

    def _judge_landed(self, vitals: Vitals) -> Anomaly | None:
        """Update the checks and return the first alarm; None while damage is only reported."""
        step, loss, episode = vitals.step, vitals.loss, self.episode
        outside = self._is_outside(loss)
        jumped = self.jump.see(step, loss, outside)
        if not outside:
            self.level.learn(loss)
            self._accepted.setdefault(step, (loss, vitals.grad_norm))
            if len(self._accepted) > REMEMBERED:
                self._accepted.popitem(last=False)
        is_learned = not (outside and episode.is_open)
        if is_learned:
            self.grad_limit.learn(vitals.grad_norm)
        alarms = [one.landed(step, vitals, self._reference, is_learned=is_learned) for one in self._more]
        standing = episode.see(step, loss) if episode.is_open else Standing.UNDECIDED
        if standing is Standing.BACK:
            episode.end()
        if self.episode.is_silent:
            return None
        if alarm := next(filter(None, alarms), jumped):
            return self._about_loss(vitals, Signal.LOSS_SPIKE if alarm is jumped else Signal.DIVERGENCE, alarm)
        return self.not_recovered(vitals) if standing is Standing.OFF else None

    def _is_outside(self, loss: float) -> bool:
        jump = self.config.jump
        above = bool(jump.every) and self.episode.is_above(loss, jump.sigmas, jump.share)
        return above or self.jump.is_outside(loss)

    def _judge_refused(self, vitals: Vitals, signal: Signal) -> Finding:
        """Judge an update above a limit: an outlier, earlier damage, or a new regime, for which the limit is raised."""
        loss, norm, step = vitals.loss, vitals.grad_norm, vitals.step + 1
        which = vitals.start if vitals.stop > vitals.start else vitals.tick  # the same, however often it is retried
        outside, evidence = self._is_outside(loss), fact("loss_outside", loss=loss, **self.level.usual_range)
        if which != self.refusals.latest and outside:  # counts for a jump, but is not learned
            jumped = self.jump.see(step, loss, True, landed=False)
            if jumped and not self.episode.is_silent:
                return Finding(self._about_loss(vitals, Signal.LOSS_SPIKE, jumped))
        norms = self.refusals.add(step, which, norm)
        if norms is not None and outside and not self.episode.is_silent:  # a new regime would not raise the loss
            alarm = Alarm(self.refusals.since, evidence + fact("refused_often", count=len(norms)))
            return Finding(self._about_loss(vitals, Signal.DIVERGENCE, alarm))
        if norms is not None:
            self.grad_limit.make_room(norms)
            self.refusals.forget()  # what the raised limit refuses again is no new regime
            if signal is Signal.LOSS_SPIKE:  # which no check of the losses has judged: it is off, or the run too young
                self.level.forget()
            log.info("note: %d updates exceeded the limit; raising it", len(norms))
            return Finding(repeat=True)
        if signal is Signal.GRAD_SPIKE:
            evidence = fact("norm_outside", norm=norm, largest=self.grad_limit.largest)
        return _refused(vitals, signal, evidence)

    def _about_loss(self, vitals: Vitals, signal: Signal, alarm: Alarm) -> Anomaly:
        """Make an anomaly of the loss. A verified state rewound to stays trusted, a step far above the best is not."""
        verified = self.episode.stands_on if self.episode.is_open else None
        since, then = alarm.since, self._reference(alarm.since)
        if then is not None:
            since = min((check.trusted(then, alarm.since) for check in self._more), default=since)
        since = since if verified is None else max(since, min(verified, vitals.step))
        return _landed(vitals, signal, alarm.evidence, since)

    def not_recovered(self, vitals: Vitals) -> Anomaly:
        evidence, since = self.episode.evidence(vitals.step), self.not_recovered_since(vitals.step)
        return _landed(vitals, Signal.NOT_RECOVERED, evidence, since)

    def not_recovered_since(self, step: int) -> int:
        """The newest trusted step of a run that is not back: what it did since the rewind does not count."""
        reference, stands_on = self.episode.reference, self.episode.stands_on
        assert reference is not None
        return min(reference.step if stands_on is None else stands_on, step)

    def start_over(self, limit: float = inf, *, ends_episode: bool = True) -> None:
        """Learn from scratch what is usual. A run that does not come below the `limit` has not learned what is new."""
        self.is_changed = True
        self._accepted.clear()
        for own in (self.level, self.jump, self.grad_limit):
            own.forget()
        for check in self._more:
            check.forget(limit)
        if ends_episode:
            self.episode.end()

    def persistent_state(self) -> dict[str, Any]:
        path = [[step, *measured] for step, measured in [*self._accepted.items()][-IN_CHECKPOINT:]]
        parts = {name: one.persistent_state() for name, one in self._lasting.items()}
        return {**self._unowned, **plain(self, self.persistent), "path": path, **parts}

    def load_persistent_state(self, state: Mapping[str, Any]) -> None:
        load(self, self.persistent, state)
        self._accepted = OrderedDict((step, (loss, norm)) for step, loss, norm in state["path"])
        for name, one in self._lasting.items():
            if name in state:  # else it was added since
                one.load_persistent_state(state[name])
        self._unowned = {name: one for name, one in state.items() if name not in self.persistent_state()}
        if self._unowned:
            log.info("no check here knows the state of %s: it is kept as it is", ", ".join(self._unowned))

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._checks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, one in self._checks.items():
            if name in state:
                one.load_state_dict(state[name])


def _landed(vitals: Vitals, signal: Signal, evidence: Facts, since: int) -> Anomaly:
    return Anomaly(signal, vitals.step, vitals.tick, max(0, since), evidence, ranks=vitals.ranks)


def _refused(vitals: Vitals, signal: Signal, evidence: Facts) -> Finding:
    place = vitals.step + 1, vitals.tick, vitals.step
    return Finding(Anomaly(signal, *place, evidence, landed=False, ranks=vitals.ranks))


def _measured(vitals: Vitals) -> Facts:
    return fact("measured", loss=vitals.loss, norm=vitals.grad_norm)
