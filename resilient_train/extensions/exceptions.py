"""What becomes of an exception that only some batches raise.

If another batch passes at the same weights, that one takes the place of the batch that raised, and the loss of the
update is NaN: so every rank meets the others in its collectives, learns of the exception at the gate, and refuses the
update, which is then examined like any other. If no batch passes it is a bug, and the run ends with its traceback,
unless a patch has a value for what raised: the weights may have left the domain of an operation.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilient_train.core import randomness
from resilient_train.core.protocols import Computed, OnError
from resilient_train.core.transaction import Transaction
from resilient_train.core.vitals import versions
from resilient_train.extensions import Extension
from resilient_train.ground.errors import TrainError, in_one_line
from resilient_train.ground.wording import IN_FILE_ONLY, counted, log
from resilient_train.parts.run import Run
from resilient_train.processes.world import is_lost_device

_TRIED = 4  # other batches
_OURS = Path(__file__).parents[1]
_USERS = (_OURS / "zoo", _OURS / "extensions" / "armor")  # which call what users wrote, or what they would call


class BatchErrors(Extension, OnError):
    """Examines exceptions as if they were losses that are not finite, where other batches pass."""

    def build(self, run: Run) -> None:
        self._run = run
        model, has_objective = run.backend.model, run.backend.objective is not None
        self._forwards = _Forwards(model) if has_objective and isinstance(model, DistributedDataParallel) else None
        self._logged: set[str] = set()
        self._bug: tuple[int, int, int] | None = None  # id of the newest, its update, and how many batches raise it
        run.on_error.append(self)

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
                    computed = self._run.backend.compute(self._run.world.on_device(other))
            except Exception:
                tried += 1
                continue
            self._note(begun, error)
            return computed
        self._bug = (id(error), begun.step, tried) if tried else None
        return None

    def escaped(self, error: BaseException) -> None:
        """Say that an exception is a bug; in the first update, that ends as in a plain loop."""
        bug, self._bug = self._bug, None
        if bug is not None and bug[0] == id(error) and bug[1] > 1:
            _, step, tried = bug
            said = f"{counted(tried, 'other batch')} at the same weights raise{'s' * (tried == 1)} as well"
            error.add_note(f"resilient_train: {said}")
            log.error("update %d: %s: it is a bug", step, said)

    def _note(self, begun: Transaction, error: Exception) -> None:
        begun.raised.append(text := in_one_line(error))
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s", "".join(traceback.format_exception(error)), extra=IN_FILE_ONLY)

    def _may_be_of_batch(self, error: Exception) -> bool:
        """Whether the policy treats it, and what raised is neither ours nor the end of a device or a connection. With
        several ranks the others are in collectives of the same forward or backward, which cannot be begun again in the
        middle.
        """
        is_ours = isinstance(error, TrainError) or is_lost_device(error) or self._run.world.is_of_group(error)
        if is_ours or self._run.policy.observe or not any(self._run.policy.ladders.values()):
            return False
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if self._run.world.size > 1:
            in_backward = any(code.co_name == "_engine_run_backward" for code in codes)
            if in_backward or self._forwards is None or self._forwards.are_together:
                return False
        last = Path(codes[-1].co_filename)
        return not last.is_relative_to(_OURS) or any(last.is_relative_to(home) for home in _USERS)

    def _others(self, open_updates: Sequence[Transaction]) -> Iterator[Any]:
        """Yield batches of other rows, then the one of the update before at the same place, if that is as it was."""
        *pending, begun = open_updates
        samples, number = self._run.samples, len(begun.inputs) - 1
        for draw in range(_TRIED if begun.update.keys else 0):
            with randomness.preserved(self._run.world.device):  # fetching rows changes it
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
