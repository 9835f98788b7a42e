"""Faults on purpose: what a run has to survive, injected where and when you say."""

from resilient_train.drill.config import parse
from resilient_train.drill.corruption import BadMoments, BitFlip
from resilient_train.drill.drill import Drill, Place
from resilient_train.drill.fault import Fault
from resilient_train.drill.faults import HotLr, InfLoss, LossSpike, NanBatch, NanGrad
from resilient_train.drill.process import Crash, Hang
from resilient_train.drill.rows import BadRow

__all__ = [
    "BadMoments",
    "BadRow",
    "BitFlip",
    "Crash",
    "Drill",
    "Fault",
    "Hang",
    "HotLr",
    "InfLoss",
    "LossSpike",
    "NanBatch",
    "NanGrad",
    "Place",
    "parse",
]
