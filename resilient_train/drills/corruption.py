"""What goes wrong between two updates: in the weights, in the optimizer's moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from resilient_train.drills.fault import StateFault, draw, own_part
from resilient_train.drills.limits import require_one_of, require_whole

_BITS = {  # the integers of the same size, and the highest bit of the exponent
    torch.float64: (torch.int64, 1 << 62),
    torch.float32: (torch.int32, 1 << 30),
    torch.float16: (torch.int16, 1 << 14),
    torch.bfloat16: (torch.int16, 1 << 14),
}


@dataclass(frozen=True, kw_only=True)
class BitFlip(StateFault):
    """One bit of one weight flips, as it does in bad memory: the highest of its exponent, and 0.02 becomes 7e36."""

    name = "bit_flip"
    bit: int | None = None  # counted from the lowest of the mantissa, 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bit is not None:
            require_whole("bit", self.bit, at_least=0)

    def lacks(self, *things: Any) -> str | None:
        model, _ = things
        weights = _flippable(model)
        if not weights:
            return "the model holds no trainable weights of 16, 32 or 64 bits"
        if (bits := min(8 * weight.element_size() for weight in weights)) <= (self.bit or 0):
            return f"bit={self.bit} is none of the {bits} of a weight, which are counted from 0"
        return None

    def spoil(self, tick: int, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        weights = _flippable(model)
        place = draw("place", self.seed, tick) % sum(weight.numel() for weight in weights)
        for weight in weights:
            if place < weight.numel():
                integers, highest = _BITS[weight.dtype]
                flipped = highest if self.bit is None else _as_signed(1 << self.bit, 8 * weight.element_size())
                weight.view(integers)[np.unravel_index(place, weight.shape)] ^= flipped
                return
            place -= weight.numel()


def _as_signed(number: int, bits: int) -> int:
    """The number that has these bits: the highest of them is the sign."""
    return number - (1 << bits) if number >> (bits - 1) else number


def _flippable(model: torch.nn.Module) -> list[torch.Tensor]:
    weights = [own_part(weight) for weight in model.parameters() if weight.requires_grad]
    return [weight for weight in weights if weight.dtype in _BITS and weight.numel()]


_SECOND_MOMENTS = (  # as torch's optimizers and those of transformers name them
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "sum",
    "exp_inf",
    "row_var",
    "col_var",
    "variance",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
)
_FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
_HOW = {"shrink": 1e-4, "zero": 0.0, "negate": -1.0}
_BLOWN_UP = 1e3  # where there is a momentum only


@dataclass(frozen=True, kw_only=True)
class BadMoments(StateFault):
    """The optimizer's second moments are far too small, zero or negative; its momentum too large if that is all."""

    name = "bad_moments"
    how: Literal["shrink", "zero", "negate"] = "shrink"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("how", self.how, tuple(_HOW))

    def lacks(self, *things: Any) -> str | None:
        _, optimizers = things
        if any(True for one in optimizers for _ in _moments(one, (*_SECOND_MOMENTS, *_FIRST_MOMENTS))):
            return None
        return "the optimizer has no moments: bad_moments needs one that keeps some, and an update before it"

    def spoil(self, tick: int, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            if second := list(_moments(optimizer, _SECOND_MOMENTS)):
                torch._foreach_mul_(second, _HOW[self.how])
            elif first := list(_moments(optimizer, _FIRST_MOMENTS)):
                torch._foreach_mul_(first, _BLOWN_UP)


def _moments(optimizer: Optimizer, names: Sequence[str]) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (state[name] for name in names if isinstance(state.get(name), torch.Tensor))
