"""Norms of gradients by weight and by layer, which the clip measures anyway. They are read only when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt

import torch

from resilient_train.watch.vitals import Sent
from resilient_train.wording import names_listed


class GradientNorms:
    """The norms of the gradients of one update, before clipping, on the device."""

    def __init__(self, measured: Sequence[tuple[Sequence[str], torch.Tensor]], *, is_recorded: bool) -> None:
        """`measured` are names of weights and their norms. To be recorded, they are sent to the host at once."""
        self._names = [name for names, _ in measured for name in names]
        self._norms = [norms for _, norms in measured]
        self._sent = Sent(torch.cat(self._norms)) if is_recorded and measured else None

    def by_weight(self) -> dict[str, float]:
        """Return each weight's norm; none if gradients are sharded or of several types. Waits unless they were sent."""
        if self._sent is None and self._norms:
            self._sent = Sent(torch.cat(self._norms))
        return dict(zip(self._names, self._sent.read(), strict=True)) if self._sent is not None else {}

    def to_record(self, total: float) -> dict[str, float]:
        """Return the norms of the layers if they are recorded now, or if the total is not finite."""
        return self.by_layer() if self._sent is not None or not isfinite(total) else {}

    def by_layer(self) -> dict[str, float]:
        """Return the norm over the weights of each layer."""
        squares: dict[str, float] = {}
        for name, norm in self.by_weight().items():
            layer = name.rpartition(".")[0] or name
            squares[layer] = squares.get(layer, 0.0) + norm * norm
        return {layer: sqrt(square) for layer, square in squares.items()}


def nonfinite(norms: Mapping[str, float]) -> str:
    """Say which weights have gradients that are not finite, in the order of the model; empty if none has.

    Backward meets the layers of most models in reverse: if all weights up to one are affected, it began there.
    """
    flags = [not isfinite(norm) for norm in norms.values()]
    names = [name for name, flag in zip(norms, flags, strict=True) if flag]
    if not names:
        return ""
    if all(flags):
        return "no gradient is finite" if len(flags) > 1 else f"the gradient of `{names[0]}` is not finite"
    began = names[-1].rpartition(".")[0] or names[-1]
    where = f", from `{began}` on backward" if len(names) > 1 and all(flags[: len(names)]) else ""
    are = "the gradient of {} is" if len(names) == 1 else "the gradients of {} are"
    return f"{are.format(names_listed(names))} not finite ({len(names):,} of {len(flags):,} weights{where})"
