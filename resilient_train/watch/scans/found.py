"""What scans tell."""

from __future__ import annotations

from typing import NamedTuple

from resilient_train.types import Signal


class Found(NamedTuple):
    """What a scan found wrong."""

    signal: Signal
    subject: str  # the tensor, or what else it is about
    evidence: str
    acceptable: bool = True  # it could be done on purpose: not if it is not finite
