"""What else an update may change, and a check of torch that user code may set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from resilient_train.core.mark import Mark
from resilient_train.core.protocols import Hook
from resilient_train.core.transaction import Transaction

_ABSENT = object()
_LOOKS = 5  # calls of `Attributes.now` in which those that change are looked for

Saved = Sequence[tuple[dict[str, Any], str, Any]]  # attributes of modules: where, name, value


def without_nan_check() -> AbstractContextManager[None]:
    """Turn autograd's check for NaN off, if it is on: it would end a run at a NaN that is refused and explained."""
    return torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False)


class BufferWatch:
    """Makes the loss NaN as soon as a watched buffer is not finite. It watches those that a rewind had to restore."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._watched = model, set[str]()

    @contextmanager
    def across_rewind(self) -> Iterator[None]:
        """Watch the buffers that are not finite before a rewind and are after it. Waits for the device."""
        broken = {name for name, buffer in self._buffers() if not buffer.isfinite().all()}
        yield
        self._watched |= {name for name, buffer in self._buffers() if name in broken and buffer.isfinite().all()}

    def spoil(self, loss: Tensor) -> Tensor:
        """Return the loss as it is, or NaN if a watched buffer is not finite now; the microscope sees why."""
        for name, buffer in self._buffers() if self._watched else ():
            if name in self._watched:
                loss = loss + (0 * buffer.detach()).sum().abs().to(loss)
        return loss

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of a type that can be not finite; those of one byte cannot be computed with."""
        for name, buffer in self._model.named_buffers():
            if buffer.is_floating_point() and buffer.element_size() > 1:
                yield name, buffer


class Attributes(Hook):
    """A model may also count its forwards, or carry a hidden state along, in plain attributes of its modules.

    Those that change in the first updates are known, numbers and tensors without a graph: a replay begins with them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [vars(module) for module in model.modules()]
        self._changing: dict[tuple[int, str], dict[str, Any]] = {}  # by the number of the table and name
        self._first: dict[tuple[int, str], Any] = {}  # as they were when they were seen first
        self._looks = 0
        self._noted: list[tuple[ref[Mark], Saved]] = []  # as they were before each of the newest two updates
        self._begun: Mark | None = None  # of the newest update, until its first forward

    def around_compute(self, update: Transaction) -> AbstractContextManager[None]:
        self._begun = update.mark if not update.losses else None
        return nullcontext()

    def forward_begins(self) -> None:
        """Note them: the loop may have set some since it was given the batch."""
        if self._begun is not None:
            self._noted, self._begun = [*self._noted[-1:], (ref(self._begun), self.now())], None

    def undone(self, mark: Mark) -> None:
        """Set back what the update that began with a mark has left not finite, for which the host waits."""
        self.set(self.before(mark), only_lost=True)

    def before(self, mark: Mark) -> Saved:
        return next((saved for one, saved in self._noted if one() is mark), ())

    def now(self) -> Saved:
        """Return those that change with the updates, as they are; tensors are not copied."""
        if self._looks < _LOOKS:
            self._looks += 1
            self._look()
        now = [(own, name, own.get(name, _ABSENT)) for (_, name), own in self._changing.items()]
        return [one for one in now if one[2] is _ABSENT or _is_state(one[2])]

    def set(self, saved: Saved, *, only_lost: bool = False) -> None:
        for own, name, value in saved:
            now = own.get(name)
            if only_lost and (value is _ABSENT or not _is_state(now) or torch.as_tensor(now).isfinite().all()):
                continue
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value

    @contextmanager
    def preserved(self, saved: Saved = ()) -> Iterator[None]:
        """Begin with `saved`; at the end they are as they were before."""
        own = self.now()
        self.set(saved)
        try:
            yield
        finally:
            self.set(own)

    def _look(self) -> None:
        for number, own in enumerate(self._tables):
            for name, value in own.items():
                place = number, name
                if _is_state(value) and self._first.setdefault(place, value) is not value:
                    self._changing[place] = own
        if self._looks == _LOOKS:
            self._first.clear()


def _is_state(value: Any) -> bool:
    """Say whether an attribute of a module may be a part of its state. A tensor with a graph would keep that alive."""
    return type(value) in (int, float) or (isinstance(value, Tensor) and not value.requires_grad)
