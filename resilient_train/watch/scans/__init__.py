"""Scans: deeper looks at the state of a run, at intervals of their own. What they see is judged without torch."""

from resilient_train.watch.scans.scans import Scans

__all__ = ["Scans"]
