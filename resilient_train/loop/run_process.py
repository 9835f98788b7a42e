"""What a process of a run does around its story: it resumes, fetches samples, agrees with other ranks, and ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import pack
from typing import NoReturn
from zlib import crc32

from resilient_train.core.transaction import Update
from resilient_train.durable.progress import Doing
from resilient_train.ground.errors import RanksDiffer, StorageFailed, TrainError
from resilient_train.ground.types import Action, Anomaly, Cause, Decision, Diagnosis, Facts, Outcome, Signal, fact
from resilient_train.ground.wording import log, say
from resilient_train.parts.run import Run
from resilient_train.processes.world import odd_ones


class RunProcess:
    def __init__(self, run: Run, report: Callable[[TrainError], None]) -> None:
        self._run, self._keeper, self._incident_log, self._report = run, run.keeper, run.incident_log, report

    def next_update(self) -> Update:
        """Fetch the samples of the next update. If the storage fails for good, save the newest verified state first."""
        try:
            return self._run.samples.next_update()
        except StorageFailed as error:
            if (snapshot := self._run.ring.newest_verified()) is not None:
                self._keeper.save_alone(snapshot)  # another rank may have its data
            self.ends()
            self._report(error)
            raise

    def ends(self) -> None:
        """Note that the process ends by itself, perhaps with an error: a resume does not blame the current samples."""
        self._keeper.progress.turned_to(Doing.ENDED, self._run.clock.tick)

    def hung(self, evidence: Facts, *, in_update: bool) -> None:
        """From another thread: write down that the run hangs, and save what can be saved."""
        progress, step = self._keeper.progress, self._run.clock.step
        progress.turned_to(Doing.HUNG if in_update and progress.is_updating else Doing.ENDED)
        lost, write = self._keeper.rescue()
        anomaly = Anomaly(Signal.HANG, step + 1, self._run.clock.tick, step, evidence)
        self._keeper.note_incident(anomaly, "end", steps_lost=lost)
        write()

    def resume(self) -> bool:
        """Resume from the newest checkpoint that verifies; False if there is none."""
        parts, controls, incident_log = self._run, self._run.controls, self._incident_log
        plan = parts.world.on_main(partial(self._keeper.resumption.plan, parts.policy.crashes))
        if not parts.world.is_main:
            incident_log.adopt(*plan.incidents)
        self._keeper.begin(plan)
        controls.effects.load_state_dict(plan.effects)
        parts.clock.tick = max(parts.clock.tick, plan.tick)
        parts.intentions.resumed()
        if plan.skipped is not None:
            parts.samples.skip(*plan.skipped)
        for found in plan.found:
            controls.note(partial(self._keeper.note_incident, **found))
        if controls.effects.has_dropped:
            controls.note()
        if parts.clock.tick:  # so that the same samples are not blamed twice for one end of the process
            self._keeper.progress.turned_to(Doing.BETWEEN)
        if plan.previous_samples_per_update:
            self._keep_samples_per_update(plan.previous_samples_per_update)
        return plan.path is not None

    def _keep_samples_per_update(self, samples: int) -> None:
        """Make updates of as many samples as the previous processes did."""
        now, size = self._run.samples.slicing, self._run.world.size
        sliced = now.for_samples(samples)
        if sliced is None or (sliced != now and not self._run.slice_as(sliced)):
            why = f"{samples} samples per update do not divide over {size} processes"
            raise TrainError(f"{why}: resume with a number that divides them, and with data that has an index")
        shape = sliced.batch_size, sliced.accumulation, size
        log.info("an update stays %d samples: %d rows x %d micro-batches x %d processes", samples, *shape)

    def require_agreement(self, differ: str = "decided_differently") -> None:
        """End the run on all ranks if they hold other settings or remedies. It is a collective."""
        digests = self._run.world.all_of(self._digest()) if self._run.world.size > 1 else ()
        if odd := odd_ones(digests):
            self._ranks_differ(odd, fact(differ, ranks=[*odd]))

    def _digest(self) -> int:
        """Digest what ranks have to agree on. Factors as float32, as their last digit may differ between machines."""
        parts = self._run
        rates = [group["lr"] for group in parts.updater.groups()]
        factors = [*parts.controls.knobs.turned, *(rate for rate in rates if isinstance(rate, float))]
        place = parts.clock.step, parts.clock.tick, parts.samples.position, parts.samples.slicing.samples
        agreed = repr(parts.controls.effects.agreed()).encode()
        return crc32(agreed, crc32(pack(f"<4q{len(factors)}f", *place, *factors)))

    def _ranks_differ(self, odd: tuple[int, ...], evidence: Facts) -> NoReturn:
        parts, since = self._run, self._run.clock.step
        anomaly = Anomaly(Signal.RANK_MISMATCH, since + 1, parts.clock.tick, since, evidence, ranks=odd)
        diagnosis = Diagnosis(Cause.PROCESS, fact("ranks_decide"))
        incident = self._incident_log.open(anomaly, diagnosis, Decision((Action("end"),)))
        self._incident_log.close(incident, Outcome.GAVE_UP)
        what = f"{say(evidence)} in update {since + 1}: the run ends before weights drift apart"
        onward = "; the same command resumes from the newest verified state" if since else ""
        error = RanksDiffer(what + onward)
        self._report(error)
        raise error
