"""Lines of code, and whose they are: a user's own, those of a library of models, or of any other."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import NamedTuple

from torch import Tensor, nn

_STANDARD = sysconfig.get_path("stdlib") + os.sep
_SITE = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)
_OURS = str(Path(__file__).parents[1]) + os.sep
CALLERS: set[str] = set()  # files that replay: what has called them is not the model's, but the loop's
_ZOO = os.path.join(_OURS, "zoo") + os.sep  # models to start from: as good as a user's own


class Line(NamedTuple):
    file: str
    line: int
    module: str = ""  # its path in the model, empty outside of it


def user_line(names: Mapping[int, str]) -> Line | None:
    """The innermost line on the stack that is not torch's or a loop's; `names` of modules by id."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in CALLERS:
        frames.append(frame)
        frame = frame.f_back
    for frame in frames:
        if is_users(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno, _module_of(frames, names))
    return None


def _module_of(frames: Iterable[FrameType], names: Mapping[int, str]) -> str:
    owners = (id(frame.f_locals.get("self")) for frame in frames)
    return next((names[owner] for owner in owners if owner in names), "")


class Raised(NamedTuple):
    line: Line | None  # the innermost one of a user's own that it passed, rather than of an installed package
    called: str  # what that called: a module by its class, anything else by its name
    of_distribution: bool = False  # that is one of torch.distributions
    refused: Tensor | None = None  # by it


def line_of(error: BaseException, names: Mapping[int, str]) -> Raised:
    passed = [*walk_tb(error.__traceback__)]
    users = [at for at, (frame, _) in enumerate(passed) if is_users(frame.f_code.co_filename)]
    own = [at for at in users if not passed[at][0].f_code.co_filename.startswith(_SITE)] or users[-1:]
    line, inside = None, [frame for frame, _ in passed]  # `inside`: what that line called
    if own:
        frame, number = passed[own[-1]]
        line = Line(frame.f_code.co_filename, number, _module_of(reversed(inside[: own[-1] + 1]), names))
        inside = inside[own[-1] + 1 :]
    called, refused = "", None
    for frame in inside:
        if not frame.f_globals.get("__name__", "").startswith("torch.distributions."):
            continue
        value = frame.f_locals.get("value")
        refused = value if isinstance(value, Tensor) else refused
        # What a density is asked about, if no weight had a part in it, came with the data: the rows are the cause,
        # and not the line that asks.
        if frame.f_code.co_name == "__init__" or not isinstance(value, Tensor) or value.requires_grad:
            called = called or _called(frame)
    if called:
        return Raised(line, called, True, refused)
    return Raised(line, _called(inside[0]) if inside else "statement")


def _called(frame: FrameType) -> str:
    owner, name = frame.f_locals.get("self"), frame.f_code.co_name
    return type(owner).__name__ if isinstance(owner, nn.Module) or name == "__init__" else name


@cache
def is_users(file: str) -> bool:
    """Say whether a file is a user's own or a library's of models, whose lines can be patched: torch's never are."""
    if file.startswith(_ZOO):
        return True
    if file.startswith(("<frozen", _OURS, *_homes("torch", "accelerate", "hydra", "omegaconf"))):
        return False
    return file.startswith(_SITE) or not file.startswith(_STANDARD)


def called_by_us(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """The frames of a stack, innermost last, from the first of ours on: not the script that has called us."""
    files = [frame.f_code.co_filename for frame in frames]
    ours = (n for n, file in enumerate(files) if file.startswith(_OURS) and not file.startswith(_ZOO))
    return frames[next(ours, 0) :]


@cache
def _homes(*packages: str) -> tuple[str, ...]:
    found = [importlib.util.find_spec(package) for package in packages]
    places = [place for spec in found if spec for place in spec.submodule_search_locations or ()]
    return tuple(os.path.abspath(place) + os.sep for place in places)
