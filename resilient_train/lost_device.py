"""What the host still finds out when a GPU is lost.

A check that fails on a GPU, such as one of an index, is reported later and anywhere, and from then on the process can
compute nothing there. On a CPU the same rows raise at their line: a copy of the model in the host's memory, with the
weights of the newest verified snapshot, gets the rows of the last two updates.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from resilient_train.data.samples import Update
from resilient_train.data.stream import Key
from resilient_train.errors import in_one_line, text_of
from resilient_train.ranks.world import is_lost_device
from resilient_train.recovery import Recovery
from resilient_train.run_parts import RunParts
from resilient_train.state.tree import Tree
from resilient_train.types import Action, Anomaly, Cause, Decision, Diagnosis, Signal
from resilient_train.update.objective import Measured
from resilient_train.wording import log, rows_named

_SECONDS = 60.0  # for all rows
_OF_ROWS = ("assert", "illegal memory access")  # what a row may be to blame for, in the words of CUDA
_LARGEST = 10**9  # weights: on the host one forward of more takes minutes


class LostDevice:
    """Notices, in `with` statements, that the GPU is lost; puts the rows that did it in quarantine."""

    def __init__(self, parts: RunParts, recovery: Recovery, objective: Measured | None) -> None:
        self._parts, self._recovery, self._objective = parts, recovery, objective
        self._begun: deque[Update] = deque(maxlen=2)  # of which one did it
        self._is_known = False

    def begins(self, update: Update) -> None:
        """Remember an update that is about to be computed."""
        self._begun.append(update)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not self._is_known and is_lost_device(error):
            self._is_known = True
            try:
                error.add_note(f"resilient_train: {self._explained(error)}")
            except Exception as failed:  # the error that the loop gets is the first one
                log.error("what became of the GPU could not be noted: %s", in_one_line(failed))

    def _explained(self, error: BaseException) -> str:
        """Save what the host has, and find the rows that did it, for the next process; return what is said of it."""
        recovery, clock = self._recovery, self._parts.clock
        keeper, incident_log = recovery.keeper, recovery.incident_log
        said = f"{text_of(error).splitlines()[0]}: this process cannot use the GPU any more"
        self._parts.ring.copier.give_up()
        lost, save = keeper.rescue()
        save()  # first: a forward on the host may take long, and may write to the snapshot
        rows, why = self._raising() if any(word in said for word in _OF_ROWS) else ((), "")
        is_cured = False
        if rows:
            said += f"; on the host {why}, with {rows_named(rows)} alone"
            advice = f"R{rows_named(rows)[1:]}: {why}; fix or remove {'it' if len(rows) == 1 else 'them'}."
            found = Diagnosis(Cause.DATA, advice, rows=rows, reasons=dict.fromkeys(rows, why))
            anomaly = Anomaly(Signal.EXCEPTION, clock.step + 1, clock.tick, clock.step, said, landed=False)
            incident = incident_log.open(anomaly, found, Decision((Action("end"),)))
            if not recovery.observes and recovery.policy.crashes is not None:
                recovery.controls.quarantine_after_crash(rows, why, incident.id)
                is_cured = {*rows} <= recovery.controls.quarantined.rows.keys()
            decision = Decision((Action("quarantine"),)) if is_cured else incident.decision
            incident_log.record_treatment(replace(incident, decision=decision, steps_lost=lost))
        else:
            times = recovery.policy.crashes
            said += f"; samples at which {times} processes in a row end are skipped" if times else ""
            log.error("%s", said)
        keeper.progress.stays(is_explained=is_cured)
        return said

    def _raising(self) -> tuple[tuple[int, ...], str]:
        """Return the rows of the last updates that raise on the host, if others do not, and what they raise."""
        snapshot = self._parts.ring.newest_verified()
        size = sum(weight.numel() for weight in self._parts.state.model.parameters())
        if self._objective is None or snapshot is None or self._parts.world.size > 1 or size > _LARGEST:
            return (), ""
        try:
            model = on_host(self._parts.state.model, snapshot.parts)
        except Exception:  # it holds tensors that are neither weights nor buffers
            return (), ""
        deadline = time.monotonic() + _SECONDS
        for keys in (keys for update in self._begun for keys in update.keys):
            self._parts.beat()
            if time.monotonic() > deadline:
                return (), ""
            if (error := self._raised(model, keys)) is None:
                continue
            rows = set[int]()
            for key in keys:
                self._parts.beat()
                # Twice: normalization over a batch refuses a single row.
                if type(self._raised(model, [key, key])) is type(error):
                    rows.add(key.row)
                if time.monotonic() > deadline:
                    return (), ""
            # A branch that no CPU has would raise for others as well.
            others = self._parts.samples.others(keys, 0)
            is_common = any(type(self._raised(model, [one, one])) is type(error) for one in others)
            if 0 < 2 * len(rows) <= len(keys) and not is_common:
                return tuple(sorted(rows)), in_one_line(error)
        return (), ""

    def _raised(self, model: nn.Module, keys: Sequence[Key]) -> Exception | None:
        """Return what the objective raises for these rows; None also where it uses the GPU."""
        assert self._objective is not None
        in_eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        try:
            with torch.no_grad(), in_eager:
                self._objective.objective(model, self._parts.samples.collated(keys))
        except Exception as error:
            return None if isinstance(error, torch.AcceleratorError) else error
        return None


def on_host(model: nn.Module, saved: Mapping[str, Tree]) -> nn.Module:
    """Copy a model without reading its device: weights and buffers are those of a snapshot."""
    memo: dict[int, object] = {}
    for name, weight in model.named_parameters():
        memo[id(weight)] = nn.Parameter(saved["weights"][name], requires_grad=False)
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                memo[id(buffer)] = saved["buffers"][f"{path}.{name}" if path else name].clone()
    bare: nn.Module = copy.deepcopy(getattr(model, "_orig_mod", model), memo)
    return bare
