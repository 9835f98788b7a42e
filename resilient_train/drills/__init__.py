"""Faults on purpose: injected where and when you say, to see a run recover from them."""

from resilient_train.drills.drill import Drill, UpdatePlace, parse
from resilient_train.drills.faults import (
    BadMoments,
    BadRow,
    BitFlip,
    Crash,
    Fault,
    Hang,
    HotLr,
    InfLoss,
    LossSpike,
    NanBatch,
    NanGrad,
)

# fmt: off
__all__ = [
    "BadMoments", "BadRow", "BitFlip", "Crash", "Drill", "Fault", "Hang", "HotLr", "InfLoss", "LossSpike", "NanBatch",
    "NanGrad", "UpdatePlace", "parse",
]
