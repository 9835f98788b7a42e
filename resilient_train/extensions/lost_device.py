"""What the host still finds out when a GPU is lost.

A failed check on a GPU is reported later, anywhere, and ends all computing there. On a CPU the same rows raise at their
line: a copy of the model, with the weights of the newest verified snapshot, gets the rows of the last two updates.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from resilient_train.core.protocols import OnError
from resilient_train.core.transaction import Transaction, Update
from resilient_train.core.tree import Tree
from resilient_train.data.stream import Key
from resilient_train.extensions import Extension
from resilient_train.ground.errors import in_one_line, text_of
from resilient_train.ground.types import Action, Anomaly, Cause, Decision, Diagnosis, Facts, Signal, fact
from resilient_train.ground.wording import log, say
from resilient_train.parts.run import Run
from resilient_train.processes.world import is_lost_device

_SECONDS = 60.0  # for the search: what is not computed by then is not blamed


class LostDevice(Extension, OnError):
    """Notices that the GPU is lost; puts the rows that did it in quarantine."""

    def build(self, run: Run) -> None:
        self._run = run
        self._begun: deque[Update] = deque(maxlen=2)  # of which one did it
        self._is_known = False
        run.on_error.append(self)

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        if len(update.inputs) == 1:
            self._begun.append(update.update)
        try:
            yield
        except Exception as error:  # a batch that is copied to the device may be the first to notice
            self.escaped(error)
            raise

    def escaped(self, error: BaseException) -> None:
        if not self._is_known and is_lost_device(error):
            self._is_known = True
            try:
                error.add_note(f"resilient_train: {self._explained(error)}")
            except Exception as failed:  # the error that the loop gets is the first one
                log.error("what became of the GPU could not be noted: %s", in_one_line(failed))

    def _explained(self, error: BaseException) -> str:
        """Save what the host has, and leave out the rows that did it in the next process; return what is said of it."""
        self._run.ring.copier.give_up()
        lost, save = self._run.keeper.rescue()
        save()  # first: a forward on the host may take long, and may write to the snapshot
        lost_gpu: dict[str, Any] = {"error": text_of(error).splitlines()[0]}
        try:
            reasons = self._raising()
        except Exception:  # too slow, or the model holds tensors that are neither weights nor buffers
            reasons = {}
        is_cured = False
        if reasons:
            rows, why = tuple(sorted(reasons)), next(iter(reasons.values()))
            of_rows = {"rows": [*rows], "why": why}
            evidence = fact("lost_gpu", **lost_gpu, **of_rows)
            found = Diagnosis(Cause.DATA, fact("rows_raise_on_host", **of_rows), rows=rows)
            is_cured = self._left_out(found, evidence, lost)
        else:
            evidence = fact("lost_gpu", **lost_gpu, times=self._run.policy.crashes)
            log.error("%s", say(evidence))
        self._run.keeper.progress.stays(is_explained=is_cured)
        return say(evidence)

    def _left_out(self, found: Diagnosis, evidence: Facts, lost: int) -> bool:
        """Open an incident for these rows; put them in quarantine, and return True, if the policy allows that."""
        clock, incident_log = self._run.clock, self._run.incident_log
        may_cure = not self._run.policy.observe and self._run.policy.crashes is not None
        is_cured = may_cure and self._run.leave_out(found.rows, found.advice, incident_log.next_id)
        anomaly = Anomaly(Signal.EXCEPTION, clock.step + 1, clock.tick, clock.step, evidence, landed=False)
        decision = Decision((Action("quarantine" if is_cured else "end"),))
        self._run.controls.note(partial(incident_log.report, anomaly, found, decision, steps_lost=lost))
        return is_cured

    def _raising(self) -> dict[int, str]:
        """Return the rows of the last updates that raise on the host, at most half of them, and what they raise."""
        snapshot, objective = self._run.ring.newest_verified(), self._run.backend.objective
        if objective is None or snapshot is None or self._run.world.size > 1:
            return {}
        model, deadline = on_host(self._run.state.model, snapshot.parts), time.monotonic() + _SECONDS

        def raised(keys: Sequence[Key]) -> dict[int, str]:
            found = {}
            for key in keys:
                self._run.beat()
                if time.monotonic() > deadline:
                    raise TimeoutError
                try:
                    # Twice: normalization over a batch refuses a single row.
                    objective.objective(model, self._run.samples.collated([key, key]))
                except torch.AcceleratorError:
                    pass  # it uses the GPU
                except Exception as error:
                    found[key.row] = in_one_line(error)
            return found

        keys = [key for update in self._begun for some in update.keys for key in some]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = raised(keys)
            # A branch that no CPU has would raise for others as well.
            is_theirs = 2 * len(found) <= len(keys) and not (found and raised(self._run.samples.others(keys, 0)))
        return found if is_theirs else {}


def on_host(model: nn.Module, saved: Mapping[str, Tree]) -> nn.Module:
    """Copy a model without reading its device: weights and buffers are those of a snapshot."""
    memo: dict[int, object] = {}
    for name, weight in model.named_parameters():
        memo[id(weight)] = nn.Parameter(saved["weights"][name], requires_grad=False)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = saved["buffers"][name].clone()
    return copy.deepcopy(model, memo)
