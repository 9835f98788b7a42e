"""Forward and backward of a batch with an objective, and what becomes of an exception that only some batches raise.

If another batch passes at the same weights, that one takes the place of the batch that raised, and the loss of the
update is NaN: so every rank meets the others in its collectives, learns of the exception at the gate, and refuses the
update, which is then examined like any other. If no batch passes it is a bug, and the run ends with its traceback,
unless a patch has a value for what raised: the weights may have left the domain of an operation.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from resilient_train.diagnose.frames import Line, line_of
from resilient_train.errors import TrainError, in_one_line, text_of
from resilient_train.numerics.domains import has_value
from resilient_train.ranks.world import is_lost_device
from resilient_train.run_parts import RunParts
from resilient_train.state import randomness
from resilient_train.state.copies import Backups
from resilient_train.state.randomness import Seeds
from resilient_train.transaction import Transaction
from resilient_train.update.objective import Measured, Metrics
from resilient_train.update.turns import DirectStepCheck
from resilient_train.watch.modes import AnomalyMode
from resilient_train.watch.vitals import versions
from resilient_train.wording import IN_FILE_ONLY, counted, log

_ON_THE_HOST = ("can't allocate memory", "not enough memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in text_of(error) for words in _ON_THE_HOST)


def memory_evidence(error: BaseException) -> str:
    return " ".join(text_of(error).split()).split(" Of the allocated memory")[0][:200] or type(error).__name__


_TRIED = 4  # other batches
_OURS = Path(__file__).parent
_USERS = (_OURS / "zoo", _OURS / "numerics")  # which call what users wrote, or what they would call

Computed = tuple[Tensor, Metrics]


@dataclass(eq=False)
class Loop:
    """How training makes an update: what the training loop does with a batch, without the loop."""

    parts: RunParts
    model: nn.Module  # as the training calls it
    bare: nn.Module  # without the wrappers of other processes
    objective: Measured | None  # None: the loop hands over its losses
    anomaly_mode: AnomalyMode
    direct_steps: DirectStepCheck
    backups: Backups
    seeds: Seeds
    stop: Callable[[], bool]  # the run was asked to stop
    treats: bool  # the policy does something about anomalies

    def __post_init__(self) -> None:
        has_forwards = self.objective is not None and isinstance(self.model, DistributedDataParallel)
        self._forwards = _Forwards(self.model) if has_forwards else None
        self._logged: set[str] = set()
        self._examined: dict[tuple[Line | None, int], int] = {}  # by line and rewinds before: the first tick

    def compute(
        self,
        batch: Any,
        begun: Transaction,
        pending: Transaction | None = None,
        spoil: Callable[[Tensor], Tensor] = lambda loss: loss,
        *,
        stands_in: bool = True,
    ) -> Computed | str:
        """Run forward and backward of the newest batch of `begun`; `pending` is the update before.

        `spoil` changes the loss on the way, in a drill. If memory runs out, return what the error says; if only this
        batch raises an exception, note it in `begun`, and return what another batch computed, which must not land.
        """
        if self._forwards is not None:
            self._forwards.begin()
        try:
            return self._computed(batch, spoil)
        except Exception as error:
            if is_out_of_memory(error):
                return memory_evidence(error)
            if not stands_in or not self._may_be_of_batch(error):
                raise
            tried = 0
            for other in self._others(begun, pending):
                try:
                    with self._forwards.again() if self._forwards is not None else nullcontext():
                        computed = self._computed(self.parts.world.on_device(other))
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
            if tried and (self.parts.clock.step or pending):  # a plain bug ends the first update as in a plain loop
                said = f"{counted(tried, 'other batch')} at the same weights raise{'s' * (tried == 1)} as well"
                error.add_note(f"resilient_train: {said}")
                log.error("update %d: %s: it is a bug", begun.step, said)
            raise

    def _note(self, begun: Transaction, error: Exception) -> None:
        begun.raised.append(text := in_one_line(error))
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s", "".join(traceback.format_exception(error)), extra=IN_FILE_ONLY)

    def _may_be_patched(self, error: Exception, tick: int) -> bool:
        """Whether a patch may help where every batch raises, and was not tried there already since the last rewind.

        Other ranks wait in the collectives of this update, and a loss scaler for its gradients.
        """
        found = line_of(error, {})
        first = self._examined.setdefault((found.line, self.parts.updates.rewinds), tick)
        is_new = tick <= first + 1  # the verdict on an update comes after the next one
        is_plain = self.parts.world.size == 1 and self.parts.updater.scaler is None
        return is_plain and is_new and (has_value(error) or bool(found.of_distribution))

    def _computed(self, batch: Any, spoil: Callable[[Tensor], Tensor] = lambda loss: loss) -> Computed:
        assert self.objective is not None
        loss, metrics = self.objective.for_training(self.model, batch)
        self.anomaly_mode.backward(loss := spoil(loss))
        return loss, metrics

    def _may_be_of_batch(self, error: Exception) -> bool:
        """Whether what raised is neither ours nor the end of a device or a connection.

        With several ranks the others are in the collectives of the same forward or backward, which cannot be begun
        again in the middle.
        """
        if not self.treats or isinstance(error, TrainError) or is_lost_device(error):
            return False
        if self.parts.world.is_of_group(error):
            return False
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if self.parts.world.size > 1:
            in_backward = any(code.co_name == "_engine_run_backward" for code in codes)
            if in_backward or self._forwards is None or self._forwards.are_together:
                return False
        last = Path(codes[-1].co_filename)
        return not last.is_relative_to(_OURS) or any(last.is_relative_to(home) for home in _USERS)

    def _others(self, begun: Transaction, pending: Transaction | None) -> Iterator[Any]:
        """Yield batches of other rows, then the one of the update before at the same place, if that is as it was."""
        samples, number = self.parts.samples, len(begun.inputs) - 1
        for draw in range(_TRIED if begun.update.keys else 0):
            with randomness.preserved(self.parts.world.device):  # fetching rows changes it
                try:
                    batch = samples.collated(samples.others(begun.update.keys[number], draw))
                except Exception:
                    continue
            yield batch
        if pending is not None and number < len(pending.inputs):
            batch = pending.inputs[number]
            if versions(batch) == pending.versions[number]:
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
