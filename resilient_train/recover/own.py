"""Remedies of a user's own, named by an import path."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from resilient_train.errors import in_one_line, unusable


def imported(key: str, path: str) -> Any:
    """Import what a dotted path names, or say which part of it does not exist."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise unusable(key, f"{path} cannot be imported: {in_one_line(error)}") from error
        except Exception as error:
            raise unusable(key, f"{path} cannot be imported: {in_one_line(error)}") from error
        for attribute in parts[count:]:
            if not hasattr(found, attribute):
                close = difflib.get_close_matches(attribute, dir(found), n=1)
                meant = f"; did you mean {close[0]}?" if close else ""
                what = f"{getattr(found, '__name__', found)} has no {attribute}{meant}"
                raise unusable(key, f"{path} cannot be imported: {what}")
            found = getattr(found, attribute)
        return found
    raise unusable(key, f"{path} cannot be imported: there is no module {parts[0]} on the path")


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Say that there is no such thing, what may have been meant, and what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]}? There" if close else "there"
    return f"no such {what} {name}; {meant} {'are' if len(names) > 1 else 'is'} {', '.join(names) or 'none'}"
