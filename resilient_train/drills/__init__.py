"""Faults on purpose: what a run has to survive, injected where and when you say."""

from resilient_train.drills.config import parse
from resilient_train.drills.corruption import BadMoments, BitFlip
from resilient_train.drills.drill import Drill, Place
from resilient_train.drills.fault import Fault
from resilient_train.drills.faults import HotLr, InfLoss, LossSpike, NanBatch, NanGrad
from resilient_train.drills.process import Crash, Hang
from resilient_train.drills.rows import BadRow

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
