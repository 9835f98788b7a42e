"""What remedies do to a run: what is in force of it, what a rewind leaves, and what a resume restores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.diagnose.damage import lost_eps
from resilient_train.errors import TrainError, in_one_line
from resilient_train.numerics.armor import Armor, CannotArmor, PatchedLine
from resilient_train.record.incident_log import IncidentLog
from resilient_train.record.quarantine import Quarantine, Quarantined
from resilient_train.recover.decide import decisions_digest, update_digest
from resilient_train.recover.knobs import Knobs
from resilient_train.recover.policy import Policy
from resilient_train.recover.remedies import Circumstances, PatchOperation
from resilient_train.run_parts import RunParts
from resilient_train.secrets import masked_tree
from resilient_train.state.ring import Snapshot
from resilient_train.types import Anomaly, Diagnosis, Incident
from resilient_train.watch.update_history import Leap
from resilient_train.wording import log

_BEGINNING = 16  # accepted updates: what breaks so soon was wrong from the start


class Controls:
    """What remedies turn, and what is in force of it, which does not rewind: the `RunControl` that remedies see.

    An effect that lasts has to be in `in_force`, `restore` and `digest`: else a restart loses it.
    """

    def __init__(self, parts: RunParts, policy: Policy, quarantined: Quarantine, keeper: CheckpointKeeper) -> None:
        self._parts, self._policy, self._keeper = parts, policy, keeper
        self.quarantined = quarantined
        self.knobs = Knobs(relax_after=policy.relax_after)
        self.micro_batch: int | None = None  # rows that memory was found to have room for
        self._armor = Armor()
        self._armored: set[tuple[str, int, str]] = set()  # by file, line and operation; also where it could not be
        self._incident: Incident | None = None  # that is being treated
        self._blamed = (0, 0)  # the samples of it
        self.rewound_to: int | None = None  # for its sake
        self.trace = 0  # of the updates that the rewind has taken back
        self._decisions: int | None = None  # their digest; None since something was decided

    def begin(self, incident: Incident, blamed: tuple[int, int]) -> None:
        """Take up an incident: what follows is done for its sake. `blamed` are the samples it may come from."""
        self._incident, self._blamed = incident, blamed
        self.rewound_to, self.trace, self._decisions = None, 0, None

    # What remedies do.

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        """Go back to a verified state: the newest one, an older one, or one at least `steps` back."""
        assert self._incident is not None
        anomaly, ring = self._incident.anomaly, self._parts.ring
        if verified := ring.verified_until(anomaly.since):
            far_enough = [snapshot for snapshot in verified if snapshot.step <= anomaly.step - steps] or verified[-1:]
            snapshot = far_enough[min(older, len(far_enough) - 1)]
            ring.restore(snapshot)
            self._parts.restore_statistics(snapshot.statistics)
        elif self._keeper.restore(anomaly.since):
            ring.clear()
            self.snapshot(self._parts.clock.step, verified=True)
        else:
            raise TrainError(f"no verified state from before step {anomaly.since + 1} can be read any longer")
        self.rewound_to = self._parts.clock.step
        self.trace = self._parts.updates.trace(self.rewound_to)
        self._parts.updates.rewound(self.rewound_to)

    def skip(self, updates: int | None = None) -> None:
        """Pass over the samples to blame, or over as many updates' worth from where the run stands now."""
        samples, (start, stop) = self._parts.samples, self._blamed
        if updates is not None:
            start = start if self.rewound_to is None else samples.position
            stop = max(stop, start + updates * samples.slicing.samples)
        samples.skip(start, stop)

    def quarantine(self) -> None:
        """Take the guilty rows out of the data."""
        incident = self._incident
        assert incident is not None
        diagnosis, step = incident.diagnosis, incident.anomaly.step
        self._parts.samples.quarantine(diagnosis.rows)
        reasons = {row: diagnosis.reasons.get(row, diagnosis.advice) for row in diagnosis.rows}
        reasons |= dict.fromkeys(reasons, "bad on purpose: a drill") if incident.drill else {}
        self.quarantined.adopt({row: Quarantined(why, step, incident.id) for row, why in reasons.items()})

    def reset_moments(self) -> None:
        """Let the optimizers start from scratch."""
        self._parts.updater.reset_moments()
        self._parts.scans.rebase()

    def armor(self) -> None:
        """Patch the line of the guilty operation, for the rest of the run."""
        assert self._incident is not None
        culprit = self._incident.diagnosis.broken
        assert culprit is not None
        where = (culprit.file, culprit.line, culprit.op)
        self._armor.add(*where)
        self._note_armored(where)
        self._parts.checks.patched()

    def mend_eps(self) -> None:
        """Raise an epsilon that is 0 in its dtype to what the dtype can hold, for the rest of the run."""
        self._parts.updater.mends_eps = True

    def lower_loss_scale(self, factor: float) -> None:
        """Scale the loss by less from now on."""
        scaler = self._parts.updater.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * factor)

    # What can be done here.

    def applicable(self, anomaly: Anomaly, diagnosis: Diagnosis, leap: Leap | None) -> Circumstances:
        """Say what can be done about an anomaly in this run at this moment. Every rank comes here."""
        parts = self._parts
        verified, reference = parts.ring.verified_until(anomaly.since), parts.checks.rewind_check.reference
        return Circumstances(
            snapshots=len(verified) or int(self._keeper.has_verified(anomaly.since)),
            # Where armor makes values up, what is out of range at the beginning says nothing about the rate.
            at_start=max(anomaly.since, reference.step if reference else 0) < _BEGINNING
            and [snapshot.step for snapshot in verified] == [0]
            and not self._armor.lines,
            mixed_precision=parts.precision.is_mixed,
            loss_scaler=parts.updater.scaler is not None,
            rows=parts.samples.rows,
            quarantined=len(self.quarantined.rows) - self.quarantined.given,
            armor=not anomaly.landed and all(parts.world.all_of(self._can_be_armored(diagnosis))),
            lost_eps=lost_eps(parts.updater.optimizers) is not None and not parts.updater.mends_eps,
            off=parts.checks.loss_excess(),
            usual_rate=leap.usual if leap else 0.0,
            leapt_to=leap.usual * leap.factor if leap and leap.is_sudden else 0.0,
        )

    def _can_be_armored(self, diagnosis: Diagnosis) -> bool:
        """Say whether it fits, unless it was tried before: what does not help once does not help twice.

        Only where the policy could put it on: to look for a line takes a pass over all objects.
        """
        culprit = diagnosis.broken
        if culprit is None or not culprit.line or not diagnosis.patchable:
            return False
        rungs = self._policy.ladder(diagnosis.cause)
        if all(one.action.remedy != PatchOperation.name for rung in rungs for one in rung.do):
            return False
        where = (culprit.file, culprit.line, culprit.op)
        if where in self._armored:
            return False
        try:
            self._armor.check(*where)
        except CannotArmor as why:
            self._armored.add(where)
            log.warning("cannot patch `%s` at %s:%d: %s", culprit.op, culprit.file, culprit.line, why)
            return False
        return True

    # What outlives a rewind, and the process.

    def snapshot(self, step: int, *, verified: bool = False) -> Snapshot | None:
        """Keep the state as it is in memory, with what is in force."""
        snapshot = self._parts.ring.take(step, verified=verified)
        if snapshot is not None:
            snapshot.statistics, snapshot.remedies = self._parts.statistics(), self.in_force()
        return snapshot

    def in_force(self) -> dict[str, Any]:
        """What is in force now, as plain data: it does not rewind, and a resume restores it."""
        updater = self._parts.updater
        in_force = {
            "tick": self._parts.clock.tick,
            "knobs": self.knobs.state_dict(),
            "skipped": [list(span) for span in self._parts.samples.skipped_spans()],
            "quarantined": sorted(self.quarantined.rows),
            "armor": [asdict(patch) for patch in self._armor.lines],
            "armored": sorted(map(list, self._armored)),
            "mends_eps": updater.mends_eps,
            "micro_batch": self.micro_batch,
            "usual_norm": updater.usual_norm,
            "reference": self._parts.checks.rewind_check.persistent_state(),
        }
        return masked_tree(in_force)  # type: ignore[no-any-return]  # it goes into files: armor knows a masked line again

    def restore(self, remedies: Mapping[str, Any]) -> None:
        """Put in force what was in force in an earlier process. Raises ValueError where that cannot be read."""
        self._decisions = None
        try:
            self.knobs.load_state_dict(remedies["knobs"])
            for start, stop in remedies["skipped"]:
                self._parts.samples.skip(int(start), int(stop))
            patches = [PatchedLine(**patch) for patch in remedies["armor"]]
            self._armored |= {(str(file), int(line), str(op)) for file, line, op in remedies["armored"]}
            usual, micro = remedies["usual_norm"], remedies["micro_batch"]
            self.micro_batch = None if micro is None else int(micro)
            self._parts.updater.mends_eps = remedies["mends_eps"] is True
            self._parts.updater.usual_norm = None if usual is None else float(usual)
            self._restore_rows(map(int, remedies["quarantined"]))
            self._parts.checks.rewind_check.load_persistent_state(remedies.get("reference"))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"the remedies in force cannot be read: {in_one_line(error)}") from error
        for patch in patches:
            try:
                again = self._armor.add_again(patch)
            except CannotArmor as why:
                log.warning("cannot patch `%s` at %s:%d any longer: %s", patch.op, patch.file, patch.line, why)
            else:
                self._note_armored((again.file, again.line, again.op))

    def _restore_rows(self, rows: Iterable[int]) -> None:
        """Keep rows in quarantine whose list is lost or damaged."""
        known = {row for row in rows if row < self._parts.samples.rows}  # there may be fewer than there were
        if lost := sorted(known - self.quarantined.rows.keys()):
            self._parts.samples.quarantine(lost)
            why = "its list was lost; a checkpoint or the journal had it"
            self.quarantined.add(lost, why, self._parts.clock.step, 0)

    def _note_armored(self, where: tuple[str, int, str]) -> None:
        self._armored.add(where)
        if self._parts.search is not None:
            self._parts.search.armored.add(where)

    def quarantine_after_crash(self, rows: Sequence[int], reason: str, incident: int) -> None:
        """Put rows in quarantine that end the process, wherever they come, as far as the budget allows."""
        self._decisions = None
        allowed = self._policy.budget.rows_of(self._parts.samples.rows)
        if len({*rows} | self.quarantined.rows.keys()) <= allowed:
            self._parts.samples.quarantine(rows)
            self.quarantined.add(rows, reason, self._parts.clock.step, incident)

    def skip_samples(self, start: int, stop: int) -> None:
        """Pass over samples that ended the process."""
        self._decisions = None
        self._parts.samples.skip(start, stop)

    def note_micro_batch(self, rows: int) -> None:
        """Note how many rows of a micro-batch memory was found to have room for."""
        self.micro_batch = rows

    def disarm(self) -> None:
        """Give the user's code back as it was: another run of this process is to find its own faults."""
        self._armor.remove()

    def digest(self, start: int, incidents: IncidentLog) -> int:
        """Digest all that ranks have to have decided alike for an update whose samples begin at `start`."""
        parts = self._parts
        if self._decisions is None:
            in_force = {
                "skipped": parts.samples.skipped_spans(),
                "quarantined": sorted(self.quarantined.rows),
                "armor": [(patch.function, patch.text, patch.count, patch.op) for patch in self._armor.lines],
                "mends_eps": parts.updater.mends_eps,
            }
            self._decisions = decisions_digest(incidents.incidents, in_force)
        step, tick, samples = parts.clock.step, parts.clock.tick, parts.samples.slicing.samples
        return update_digest(self._decisions, step, tick, start, samples, self.knobs.values)
