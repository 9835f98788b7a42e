"""The precision of the forward: as Accelerate prepared it, or full for a stretch."""

from __future__ import annotations

from typing import Any

from torch import nn


class Precision:
    """Takes a model's forward out of Accelerate's autocast and puts it back."""

    def __init__(self, model: nn.Module, mixed: str | None) -> None:
        self._model: Any = model
        self._prepared = model.forward
        self._plain = getattr(model, "_original_forward", None) if mixed in ("fp16", "bf16") else None
        self._is_higher = False

    @property
    def is_mixed(self) -> bool:
        """Say whether there is a higher precision to go to."""
        return self._plain is not None

    def be(self, *, higher: bool) -> None:
        """Compute the forwards from now on in full precision, or as prepared."""
        if self._plain is not None and higher != self._is_higher:
            self._is_higher = higher
            self._model.forward = self._plain if higher else self._prepared
