"""Imports by dotted path, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from typing import Any

from resilient_train.errors import in_one_line


class Unimportable(Exception):
    """A dotted path cannot be imported; the message says which part of it is missing."""


def find_in_working_directory() -> None:
    """Let `resilient-train` find a user's modules where `python -m resilient_train` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def find(path: str) -> Any:
    """Import the object at a dotted path. Raises Unimportable with the part that does not exist."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise Unimportable(f"{name} needs {error.name}, which is not installed") from error
        except Exception as error:
            raise Unimportable(in_one_line(error)) from error
        for attribute in parts[count:]:
            if not hasattr(found, attribute):
                what = f"{getattr(found, '__name__', found)} has no {attribute}"
                raise Unimportable(f"{what}{similar(attribute, dir(found))}")
            found = getattr(found, attribute)
        return found
    raise Unimportable(f"there is no module {parts[0]} on the path")


def similar(name: object, known: Iterable[str], then: str = "") -> str:
    """Suggest the closest known name, if one is close; `then` follows, as a sentence of its own after a suggestion."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    if close:
        return f"; did you mean {close[0]}?" + (f" {then[0].upper()}{then[1:]}" if then else "")
    return f"; {then}" if then else ""
