"""What becomes of an exception that only some batches raise.

If another batch passes at the same weights, that one takes the place of the batch that raised, and the loss of the
update is NaN: so every rank meets the others in its collectives, learns of the exception at the gate, and refuses the
update, which is then examined like any other. If no batch passes it is a bug, and the run ends with its traceback.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from resilient_train.core import randomness
from resilient_train.core.protocols import Computed, OnError
from resilient_train.core.transaction import Transaction
from resilient_train.core.vitals import versions
from resilient_train.extensions import Extension
from resilient_train.ground.errors import TrainError, in_one_line, running
from resilient_train.ground.wording import IN_FILE_ONLY, log
from resilient_train.parts.run import Run
from resilient_train.processes.world import is_lost_device

_TRIED = 8  # other batches
_OURS = Path(__file__).parents[1]
_USERS = (_OURS / "zoo", _OURS / "extensions" / "armor")  # which call what users wrote, or what they would call


class BatchErrors(Extension, OnError):
    """Examines exceptions as if they were losses that are not finite, where other batches pass."""

    def build(self, run: Run) -> None:
        self._run = run
        run.on_error.append(self)

    def loss_instead(self, error: Exception, open_updates: Sequence[Transaction]) -> Computed | None:
        """Note an exception that only this batch raises, and return what another batch computed."""
        begun = open_updates[-1]
        if not self._may_be_of_batch(error):
            return None
        for other in self._others(open_updates):
            try:
                computed = self._run.backend.compute(self._run.world.on_device(other))
            except Exception:
                continue
            begun.raised.append(in_one_line(error))
            log.info("%s", "".join(traceback.format_exception(error)), extra=IN_FILE_ONLY)
            return computed
        return None

    def _may_be_of_batch(self, error: Exception) -> bool:
        """Whether the policy treats it, and what raised is neither ours nor the end of a device or a connection. With
        several ranks the others are in the collectives of the same backward, which cannot be begun again in the middle,
        or of a forward, but for DistributedDataParallel.
        """
        is_ours = isinstance(error, TrainError) or is_lost_device(error) or self._run.world.is_of_group(error)
        if is_ours or self._run.policy.observe or not any(self._run.policy.ladders.values()):
            return False
        if self._run.world.size > 1:
            model = self._run.backend.model
            is_replicated = isinstance(model, DistributedDataParallel)
            if not is_replicated or (model.broadcast_buffers and [*model.buffers()]):
                return False
            if "_engine_run_backward" in running(error):
                return False
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        return not last.is_relative_to(_OURS) or any(last.is_relative_to(home) for home in _USERS)

    def _others(self, open_updates: Sequence[Transaction]) -> Iterator[Any]:
        """Yield batches of other rows, then the one of the update before at the same place, if that is as it was."""
        *pending, begun = open_updates
        samples, number = self._run.samples, len(begun.inputs) - 1
        for draw in range(_TRIED if begun.update.keys else 0):
            with randomness.preserved(self._run.world.device):  # fetching rows changes it
                try:
                    others = samples.others(begun.update.keys[number], draw)
                    # Where many rows are bad, hardly a batch is without; but one row may be fine.
                    batch = samples.collated(others if draw < _TRIED / 2 else others[:1] * len(others))
                except Exception:
                    continue
            yield batch
        for one in pending:
            if number < len(one.inputs) and versions(batch := one.inputs[number]) == one.versions[number]:
                yield batch
