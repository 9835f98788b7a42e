"""Whose line it is: the innermost frame of a user's own code, and the module it stands in."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

from torch import nn

_STANDARD = sysconfig.get_path("stdlib") + os.sep
_SITE = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)
_US = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ZOO = os.path.join(_US, "zoo") + os.sep  # models to start from: as good as a user's own
_LIBRARIES = ("torch", "accelerate", "hydra", "omegaconf")
_AT_NEED = ("transformers",)  # nobody's own code, but better than no line at all


@dataclass(frozen=True, slots=True)
class Line:
    """A line of code, and the module whose forward it belongs to."""

    file: str
    line: int
    module: str = ""  # its path in the model, empty outside of it


def user_line(names: dict[int, str]) -> Line | None:
    """The innermost line on the stack outside of torch, accelerate, transformers and us; `names` of modules by id."""
    second: Line | None = None
    module: str | None = None
    for frame in _stack():
        if module is None and isinstance(owner := frame.f_locals.get("self"), nn.Module):
            module = names.get(id(owner))
        rank = _rank(frame.f_code.co_filename)
        if rank == 0:
            module = _module(frame, names) if module is None else module
            return Line(frame.f_code.co_filename, frame.f_lineno, module or "")
        if rank == 1 and second is None:
            second = Line(frame.f_code.co_filename, frame.f_lineno, module or "")
    return second


def is_users(file: str) -> bool:
    """Say whether a file is somebody's own."""
    return _rank(file) == 0


def called_by_us(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """Of a stack, the innermost frame last, what we have called: not the script that has called us."""
    files = [frame.f_code.co_filename for frame in frames]
    ours = (n for n, file in enumerate(files) if file.startswith(_US) and not file.startswith(_ZOO))
    return frames[next(ours, 0) :]


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType | None, names: dict[int, str]) -> str:
    """The module in whose forward a function was called."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back
    return ""


@lru_cache(maxsize=4096)
def _rank(file: str) -> int:
    """0: a user's own; 1: of a library of models; 2: of nobody who could change it."""
    if file.startswith(_ZOO):
        return 0
    if file.startswith(("<frozen", _US, *_homes(_LIBRARIES))):
        return 2
    if file.startswith(_homes(_AT_NEED)):
        return 1
    is_standard = file.startswith(_STANDARD) and not file.startswith(_SITE)
    return 2 if is_standard else 0


@lru_cache
def _homes(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Where packages are installed."""
    found = [importlib.util.find_spec(package) for package in packages]
    places = [place for spec in found if spec for place in spec.submodule_search_locations or ()]
    return tuple(os.path.abspath(place) + os.sep for place in places)
