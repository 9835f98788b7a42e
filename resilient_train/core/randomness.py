"""The random number generators of a process: seeded by a place in the run, captured and restored; determinism."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What random numbers are used for: the same place in a run has different ones for each purpose."""

    INITIAL_WEIGHTS = 1
    UPDATE = 2
    ROW = 3
    COLLATE = 4
    PROBE = 5
    BETWEEN = 6  # two updates
    LOADER = 7  # of a user's own: its next batch


def mix(purpose: Purpose, *parts: int) -> int:
    """Hash a place in the run into 64 well-mixed bits (chained splitmix64), the same on all machines and versions."""
    state = int(purpose)
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_host(seed: int) -> None:
    """Seed Python, numpy and torch's CPU generator in 6 us; `torch.manual_seed` takes 100, for all accelerators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int, device: torch.device) -> None:
    seed_host(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def capture(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Restore every generator after the block: random numbers that it draws do not change the training."""
    states = capture(device)
    try:
        yield
    finally:
        restore(states, device)


class Seeds:
    """Seeds the generators by the place in the run, so that a repeated update draws the same numbers: its dropout."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._seed, self._rank, self._device = seed, rank, device

    def for_update(self, start: int) -> None:
        seed_all(mix(Purpose.UPDATE, self._seed, start, self._rank), self._device)

    def between(self, position: int) -> None:
        """Prepare them for the code between two updates: undoing an update also undoes its random numbers."""
        seed_all(mix(Purpose.BETWEEN, self._seed, position, self._rank), self._device)
