"""A training run that looks after itself. Importing it loads neither Hydra nor MLflow, and torch only for a guard."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_train.extensions.diagnosis.examine import examine as examine
    from resilient_train.ground.errors import GaveUp as GaveUp
    from resilient_train.loop.guard import Guard as Guard
    from resilient_train.processes.process_exit import StopRequests as StopRequests
    from resilient_train.processes.world import join as join
    from resilient_train.trainers import hf as hf
    from resilient_train.trainers import lightning as lightning

__all__ = ["GaveUp", "Guard", "StopRequests", "examine", "hf", "join", "lightning"]

__version__ = "0.1.0"

_HOMES = {
    "Guard": "resilient_train.loop.guard",
    "GaveUp": "resilient_train.ground.errors",
    "examine": "resilient_train.extensions.diagnosis.examine",
    "StopRequests": "resilient_train.processes.process_exit",
    "join": "resilient_train.processes.world",
}
_ADAPTERS = ("hf", "lightning")  # of trainers; only that of Lightning imports it


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        return import_module(f"resilient_train.trainers.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
