"""Detectors side by side: ours, and those that people use. Each sees one attempted update after the other."""

from __future__ import annotations

import logging
from collections import deque
from math import isfinite, sqrt
from statistics import median
from typing import Any, Protocol

from resilient_train.extensions.checks.rate import Panel
from resilient_train.ground.types import Signal, Vitals
from resilient_train.loop.settings import ChecksConfig

ALARM, REFUSED = "alarm", "refused"


class Detector(Protocol):
    def see(self, loss: float, norm: float) -> str | None:
        """`ALARM` asks for something to be done about the run, `REFUSED` only kept this update from landing."""


class Ours:
    """Our checks behind a gate that does as it is told."""

    def __init__(self, config: ChecksConfig) -> None:
        self.checks = Panel.of(config).checks
        self.tick = self.step = 0
        self.since: int | None = None

    def see(self, loss: float, norm: float) -> str | None:
        self.tick += 1
        refused = self._gate(loss, norm)
        finding = self.checks.judge(self._vitals(loss, norm, refused))
        if finding.repeat:
            refused = self._gate(loss, norm)
            assert refused is None, "a repeated update lands"
            finding = self.checks.judge(self._vitals(loss, norm, refused))
        if finding.anomaly is None:
            return None
        self.since = finding.anomaly.since
        by_limit = finding.anomaly.signal in (Signal.GRAD_SPIKE, Signal.LOSS_SPIKE)
        return REFUSED if by_limit and not finding.anomaly.landed else ALARM

    def _gate(self, loss: float, norm: float) -> Signal | None:
        if not isfinite(loss):
            return Signal.NONFINITE_LOSS
        if not isfinite(norm):
            return Signal.NONFINITE_GRAD
        if not loss <= self.checks.limits[0]:
            return Signal.LOSS_SPIKE
        return None if norm <= self.checks.limits[1] else Signal.GRAD_SPIKE

    def _vitals(self, loss: float, norm: float, refused: Signal | None) -> Vitals:
        self.step += refused is None
        return Vitals(
            self.tick, self.step, refused is None, loss, norm, 1e-3, self.tick, self.tick + 1, refused=refused
        )


class MeanSigma:
    """A loss or gradient norm above mean + 6 sigma of the last 128, as OLMo's optimizers skip steps."""

    def __init__(self, window: int = 128, sigmas: float = 6.0) -> None:
        self.sigmas = sigmas
        self.kept = tuple(deque[float](maxlen=window) for _ in range(2))

    def see(self, loss: float, norm: float) -> str | None:
        high = [self._is_high(kept, value) for kept, value in zip(self.kept, (loss, norm), strict=True)]
        return ALARM if any(high) else None

    def _is_high(self, kept: deque[float], value: float) -> bool:
        if not isfinite(value):
            return True
        count = len(kept)
        high = False
        if count >= (kept.maxlen or 0) // 2:
            mean = sum(kept) / count
            high = value > mean + self.sigmas * sqrt(sum((one - mean) ** 2 for one in kept) / (count - 1))
        kept.append(value)
        return high


class MedianMad:
    """A loss above median + 10 median absolute deviations of the last 128."""

    def __init__(self, window: int = 128, times: float = 10.0) -> None:
        self.times = times
        self.kept = deque[float](maxlen=window)

    def see(self, loss: float, norm: float) -> str | None:
        if not (isfinite(loss) and isfinite(norm)):
            return ALARM
        high = False
        if len(self.kept) >= (self.kept.maxlen or 0) // 2:
            middle = median(self.kept)
            high = loss > middle + self.times * median(abs(one - middle) for one in self.kept)
        self.kept.append(loss)
        return ALARM if high else None


class Arc:
    """The controller of `arc-training` with its own defaults, around a model of one weight.

    The curve is its loss and its gradient. The weight never moves, so the checks that look at weights are off.
    """

    def __init__(self) -> None:
        import torch
        from arc import Controller, ControllerConfig  # type: ignore[import-not-found]

        logging.getLogger("arc").setLevel(logging.CRITICAL)
        self._tensor = torch.tensor
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.config = ControllerConfig(enable_lyapunov=False, enable_weight_health=False, verbose=False)
        self.config.async_checkpoint = False
        self._make: Any = Controller
        self.arc = Controller(self.model, self.optimizer, config=self.config)

    def see(self, loss: float, norm: float) -> str | None:
        self.model.weight.grad = self._tensor([[norm]])
        action = self.arc.step(self._tensor(loss))
        return ALARM if action.failure_type else None
