"""Forward and backward of a batch with an objective, and what becomes of an exception that only some batches raise.

If another batch passes at the same weights, that one takes the place of the batch that raised, and the loss of the
update is NaN: so every rank meets the others in its collectives, learns of the exception at the gate, and refuses the
update, which is then examined like any other. If no batch passes it is a bug, and the run ends with its traceback,
unless a patch has a value for what raised: the weights may have left the domain of an operation.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilient_train.core import randomness
from resilient_train.core.controls import Effect
from resilient_train.core.mark import Marks
from resilient_train.core.policy import Policy
from resilient_train.core.protocols import Computed, Hook, Retry
from resilient_train.core.randomness import Seeds
from resilient_train.core.transaction import Transaction
from resilient_train.core.vitals import Metrics, versions
from resilient_train.durable.keeper import CheckpointKeeper
from resilient_train.extensions.armor.domains import has_value
from resilient_train.extensions.diagnosis.frames import Line, line_of
from resilient_train.extensions.run_parts import RunParts
from resilient_train.extensions.scans.modes import AnomalyMode, Attributes, BufferWatch
from resilient_train.ground.errors import ConfigError, TrainError, in_one_line, text_of
from resilient_train.ground.types import ProcessIncident, Signal, fact
from resilient_train.ground.wording import IN_FILE_ONLY, counted, log
from resilient_train.processes.world import is_lost_device, is_out_of_memory

_TRIED = 4  # other batches
_OURS = Path(__file__).parents[1]
_USERS = (_OURS / "zoo", _OURS / "extensions" / "armor")  # which call what users wrote, or what they would call


Objective = Callable[[Any, Any], Any]


class Measured:
    """Calls an objective and checks what it returns: the loss must be a scalar tensor."""

    def __init__(self, objective: Objective, name: str, key: str = "objective._target_") -> None:
        """`key` is the setting that gave the objective: error messages begin with it."""
        self.objective, self.name, self.key = objective, name, key
        self.buffers: BufferWatch | None = None  # of the model that it is called with
        self.changes: list[Callable[[torch.Tensor], torch.Tensor]] = []  # of the loss in training, as in a drill

    def __call__(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        answer = self.objective(model, batch)
        loss, given = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        if not isinstance(loss, torch.Tensor):
            raise self._error(f"returned a {type(loss).__name__} as the loss: expected a scalar tensor")
        if loss.numel() != 1:
            raise self._error(f"returned a loss of shape {list(loss.shape)}: expected a scalar, such as its mean()")
        if not isinstance(given, Mapping):
            raise self._error(f"returned a {type(given).__name__} next to the loss: expected {{name: value}}")
        loss = loss.reshape(()) if self.buffers is None else self.buffers.spoil(loss.reshape(()))
        metrics: dict[str, torch.Tensor | float] = {}
        for key, value in given.items():
            if (name := str(key)) == "loss":
                raise self._error("returned a metric named loss: the loss itself has that name")
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                # Detached: it is kept until it is reported, and its graph would keep the whole forward alive.
                metrics[name] = value.detach().reshape(())
            elif isinstance(value, int | float):
                metrics[name] = value
            else:
                what = type(value).__name__ + (f" of shape {list(value.shape)}" if hasattr(value, "shape") else "")
                raise self._error(f"returned a {what} as the metric {name}: expected a number or a scalar tensor")
        return loss, metrics

    def for_training(self, model: Any, batch: Any) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = self(model, batch)
        if not loss.requires_grad:
            why = "something between the weights and the loss detaches it (.detach(), .item(), no_grad, argmax)"
            if not any(one.requires_grad for one in model.parameters()):
                why = "all weights of the model are frozen (requires_grad=False)"
            raise self._error(f"returned a loss without a graph: {why}")
        for change in self.changes:
            loss = change(loss)
        return loss, metrics

    def _error(self, why: str) -> ConfigError:
        return ConfigError(self.key, self.name, why)


@dataclass(frozen=True)
class Computation:
    """How the run makes an update: what the training loop does with a batch, without the loop."""

    model: nn.Module  # as the training calls it
    bare: nn.Module  # without the wrappers of other processes
    objective: Measured | None  # None: the loop hands over its losses
    anomaly_mode: AnomalyMode
    marks: Marks
    attributes: Attributes  # of its modules
    seeds: Seeds

    def compute(self, batch: Any) -> Computed:
        assert self.objective is not None
        self.attributes.forward_begins()
        loss, metrics = self.objective.for_training(self.model, batch)
        self.anomaly_mode.backward(loss)
        return loss, metrics

    def why_no_gradient(self, loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> str:
        if not any(one.requires_grad for one in weights):
            return "no weight has a gradient: all that the optimizer trains are frozen (requires_grad=False)"
        graph, left = set[Any](), [loss.grad_fn]
        while left:
            if (node := left.pop()) is not None and node not in graph:
                graph.add(node)
                left += [one for one, _ in node.next_functions]
        used = {id(getattr(node, "variable", None)) for node in graph}
        if graph and not used & set(map(id, weights)):
            return "no weight has a gradient: the loss was not computed with the guarded model, or is detached from it"
        return "no weight has a gradient: call loss.backward(), or accelerator.backward(loss), before"


class BatchErrors(Hook):
    """Examines exceptions as if they were losses that are not finite, where other batches pass."""

    def __init__(self, parts: RunParts, computation: Computation, policy: Policy) -> None:
        self.parts, self._computation, self._policy = parts, computation, policy
        model, has_objective = computation.model, computation.objective is not None
        self._forwards = _Forwards(model) if has_objective and isinstance(model, DistributedDataParallel) else None
        self.counts_forwards = self._forwards is not None
        self._logged: set[str] = set()
        self._examined: dict[tuple[Line | None, int], int] = {}  # by line and rewinds before: the first tick

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        if self._forwards is not None:
            self._forwards.begin()
        yield

    def loss_instead(self, error: Exception, open_updates: Sequence[Transaction]) -> Computed | None:
        """Note an exception that only this batch raises, and return what another batch computed."""
        begun = open_updates[-1]
        if not self._may_be_of_batch(error):
            return None
        tried = 0
        for other in self._others(open_updates):
            try:
                with self._forwards.again() if self._forwards is not None else nullcontext():
                    computed = self._computation.compute(self.parts.world.on_device(other))
            except Exception:
                tried += 1
                continue
            self._note(begun, error)
            return computed
        if tried and self._may_be_patched(error, begun.tick):
            self._note(begun, error)
            for weight in self.parts.updater.weights:
                weight.grad = torch.zeros_like(weight)
            return torch.full((), math.nan, device=self.parts.world.device), {}
        if tried and begun.step > 1:  # a plain bug ends the first update as in a plain loop
            said = f"{counted(tried, 'other batch')} at the same weights raise{'s' * (tried == 1)} as well"
            error.add_note(f"resilient_train: {said}")
            log.error("update %d: %s: it is a bug", begun.step, said)
        return None

    def _note(self, begun: Transaction, error: Exception) -> None:
        begun.raised.append(text := in_one_line(error))
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s", "".join(traceback.format_exception(error)), extra=IN_FILE_ONLY)

    def _may_be_patched(self, error: Exception, tick: int) -> bool:
        """Whether a patch may help where every batch raises, and was not tried there already since the last rewind:
        other ranks wait in the collectives of this update, and a loss scaler for its gradients.
        """
        found = line_of(error, {})
        first = self._examined.setdefault((found.line, self.parts.updates.rewinds), tick)
        is_new = tick <= first + 1  # the verdict on an update comes after the next one
        is_plain = self.parts.world.size == 1 and self.parts.updater.scaler is None
        return is_plain and is_new and (has_value(error) or bool(found.of_distribution))

    def _may_be_of_batch(self, error: Exception) -> bool:
        """Whether the policy treats it, and what raised is neither ours nor the end of a device or a connection. With
        several ranks the others are in collectives of the same forward or backward, which cannot be begun again in the
        middle.
        """
        is_ours = isinstance(error, TrainError) or is_lost_device(error) or self.parts.world.is_of_group(error)
        if is_ours or self._policy.observe or not any(self._policy.ladders.values()):
            return False
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if self.parts.world.size > 1:
            in_backward = any(code.co_name == "_engine_run_backward" for code in codes)
            if in_backward or self._forwards is None or self._forwards.are_together:
                return False
        last = Path(codes[-1].co_filename)
        return not last.is_relative_to(_OURS) or any(last.is_relative_to(home) for home in _USERS)

    def _others(self, open_updates: Sequence[Transaction]) -> Iterator[Any]:
        """Yield batches of other rows, then the one of the update before at the same place, if that is as it was."""
        *pending, begun = open_updates
        samples, number = self.parts.samples, len(begun.inputs) - 1
        for draw in range(_TRIED if begun.update.keys else 0):
            with randomness.preserved(self.parts.world.device):  # fetching rows changes it
                try:
                    batch = samples.collated(samples.others(begun.update.keys[number], draw))
                except Exception:
                    continue
            yield batch
        for one in pending:
            if number < len(one.inputs) and versions(batch := one.inputs[number]) == one.versions[number]:
                yield batch


class _Forwards:
    """Counts the forwards of a model in DistributedDataParallel: each begins with a broadcast of the buffers.

    The other ranks make as many as the batch that raised would have made: a stand-in leaves out those that were made.
    Each forward that ends sets whether the next one broadcasts; the first finds what the micro-batch before has left.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._made, self._synced, self._is_again, self._syncs_first = model, 0, 0, False, True
        self.are_together = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        model.register_forward_pre_hook(self._count)

    def begin(self) -> None:
        self._made = self._synced = 0
        self._syncs_first = self._model.require_forward_param_sync

    @contextmanager
    def again(self) -> Iterator[None]:
        self._synced, self._made, self._is_again = max(self._synced, self._made), 0, True
        self._model.require_forward_param_sync = self._syncs_first
        try:
            yield
        finally:
            self._is_again = False

    def _count(self, model: nn.Module, args: Sequence[Any]) -> None:
        self._made += 1
        if self._is_again and self._made <= self._synced:
            self._model.require_forward_param_sync = False


_SMALLER = "use a smaller batch_size with more gradient accumulation, or activation checkpointing"


def memory_evidence(error: BaseException) -> str:
    return " ".join(text_of(error).split()).split(" Of the allocated memory")[0][:200] or type(error).__name__


class MicroBatchSizer:
    """Retries an update that ran out of memory with smaller micro-batches."""

    def __init__(
        self, parts: RunParts, policy: Policy, keeper: CheckpointKeeper, note: Callable[[Callable[..., object]], None]
    ) -> None:
        """`note` writes an incident together with the effects that have changed."""
        self._world, self._samples, self._policy, self._note = parts.world, parts.samples, policy, note
        self._keeper = keeper
        self._rows = 0  # of a micro-batch that fit into memory, where it was made smaller

    def effect(self) -> Effect:
        def restore(rows: Any) -> None:
            self._rows = int(rows)

        return Effect("micro_batch", lambda: self._rows, restore)

    def as_before(self, samples: int) -> None:
        """Make updates of as many samples as the previous processes did, in micro-batches that fit into memory."""
        if samples:
            now, size = self._samples.slicing, self._world.size
            sliced = now.for_samples(samples)
            if sliced is None or (sliced != now and not self._samples.slice_as(sliced)):
                why = f"{samples} samples per update do not divide over {size} processes"
                raise TrainError(f"{why}: resume with a number that divides them, and with data that has an index")
            self._has_changed()
            shape = sliced.batch_size, sliced.accumulation, size
            log.info("an update stays %d samples: %d rows x %d micro-batches x %d processes", samples, *shape)
        while self._samples.slicing.batch_size > self._rows > 0 and (halved := self._samples.slicing.halved()):
            if not self._samples.slice_as(halved):
                break
            self._has_changed()

    def loss_instead(self, error: Exception, open_updates: Sequence[Transaction]) -> Retry | None:
        """Halve the micro-batches. Several processes end: the others wait in a collective."""
        if not is_out_of_memory(error):
            return None
        step, evidence = open_updates[-1].step, memory_evidence(error)
        what, halved = f"out of memory in update {step}: {evidence}", self._samples.slicing.halved()
        incidents = self._keeper.incident_log.incidents
        is_exhausted = sum(one.anomaly.signal is Signal.OUT_OF_MEMORY for one in incidents) >= self._policy.halvings
        if halved is None or is_exhausted or self._world.size > 1 or not self._samples.slice_as(halved):
            raise TrainError(f"{what}; {_SMALLER}")
        return partial(self.note_smaller, step, evidence)

    def note_smaller(self, step: int, reason: str) -> None:
        self._has_changed()
        self._rows = rows = self._samples.slicing.batch_size
        evidence = fact("smaller_batch", why=reason, rows=rows)
        found = ProcessIncident(Signal.OUT_OF_MEMORY, step, step - 1, evidence, "smaller_batch")
        self._note(partial(self._keeper.note_incident, found))

    def _has_changed(self) -> None:
        self._world.accelerator.gradient_accumulation_steps = self._samples.slicing.accumulation
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
