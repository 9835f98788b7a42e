"""Checks: pure judgement of the vitals of one update after the other. Free of torch."""

from resilient_train.watch.checks.limit import NO_LIMIT
from resilient_train.watch.checks.panel import Finding, Panel

__all__ = ["NO_LIMIT", "Finding", "Panel"]
