"""Whose line it is: the innermost frame of a user's own code, and the module it stands in."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from resilient_train.numerics.domains import is_discrete

_STANDARD = sysconfig.get_path("stdlib") + os.sep
_SITE = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ZOO = os.path.join(_OURS, "zoo") + os.sep  # models to start from: as good as a user's own
_USERS, _MODELS, _OTHERS = range(3)  # whose a file is: a user's own, a library's of models, any other library's


class Line(NamedTuple):
    """A line of code, and the module whose forward it belongs to."""

    file: str
    line: int
    module: str = ""  # its path in the model, empty outside of it


def user_line(names: dict[int, str]) -> Line | None:
    """The innermost line on the stack outside of torch, accelerate and us; `names` of modules by id.

    A line of transformers counts only if there is no other.
    """
    second: Line | None = None
    module: str | None = None
    for frame in _outward(sys._getframe(1)):
        if module is None and isinstance(owner := frame.f_locals.get("self"), nn.Module):
            module = names.get(id(owner))
        whose = _whose(frame.f_code.co_filename)
        if whose == _USERS and module is None:  # of a function that was called in a forward
            owners = (outer.f_locals.get("self") for outer in _outward(frame))
            module = next((names[id(one)] for one in owners if isinstance(one, nn.Module) and id(one) in names), "")
        line = Line(frame.f_code.co_filename, frame.f_lineno, module or "")
        if whose == _USERS:
            return line
        if whose == _MODELS and second is None:
            second = line
    return second


class Raised(NamedTuple):
    """Where an exception came from."""

    line: Line | None  # the innermost one of a user's own that it passed, rather than of an installed package
    of_distribution: str  # what of torch.distributions that called
    called: str  # what it called at all: a module by its class, anything else by its name


def line_of(error: BaseException, names: dict[int, str]) -> Raised:
    """Return where an exception came from, by its traceback."""
    line, of_distribution, called, module = None, "", "", ""
    for frame, number in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        module = names.get(id(owner), module) if isinstance(owner, nn.Module) else module
        file = frame.f_code.co_filename
        if is_users(file) and (line is None or not _is_installed(file)):
            line, of_distribution, called = Line(file, number, module), "", ""
            continue
        name = frame.f_code.co_name
        if not called:
            called = type(owner).__name__ if isinstance(owner, nn.Module) or name == "__init__" else name
        if not of_distribution and frame.f_globals.get("__name__", "").startswith("torch.distributions."):
            if name == "__init__":
                of_distribution = type(owner).__name__
            # There is no count nearest to an impossible one. And what a density is asked about, if no weight had a part
            # in it, came with the data: the line that asks is innocent, and the rows are to blame.
            elif not is_discrete(owner) and _is_learned(frame.f_locals.get("value")):
                of_distribution = name
    return Raised(line, of_distribution, called or "statement")


def _is_learned(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.requires_grad


def is_users(file: str) -> bool:
    """Say whether a file is a user's own."""
    return _whose(file) == _USERS


def _is_installed(file: str) -> bool:
    return file.startswith(_SITE)


def called_by_us(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """The frames of a stack, innermost last, from the first of ours on: not the script that has called us."""
    files = [frame.f_code.co_filename for frame in frames]
    ours = (n for n, file in enumerate(files) if file.startswith(_OURS) and not file.startswith(_ZOO))
    return frames[next(ours, 0) :]


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _whose(file: str) -> int:
    if file.startswith(_ZOO):
        return _USERS
    if file.startswith(("<frozen", _OURS, *_homes("torch", "accelerate", "hydra", "omegaconf"))):
        return _OTHERS
    if file.startswith(_homes("transformers")):
        return _MODELS
    return _OTHERS if file.startswith(_STANDARD) and not file.startswith(_SITE) else _USERS


@cache
def _homes(*packages: str) -> tuple[str, ...]:
    """Where packages are installed."""
    found = [importlib.util.find_spec(package) for package in packages]
    places = [place for spec in found if spec for place in spec.submodule_search_locations or ()]
    return tuple(os.path.abspath(place) + os.sep for place in places)
