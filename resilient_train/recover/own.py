"""Remedies of a user's own, named by an import path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resilient_train.errors import unusable
from resilient_train.imports import Unimportable, find, similar


def imported(key: str, path: str) -> Any:
    """Import the remedy that a dotted path names, or raise with the place in the policy where it stands.

    Whatever else it names, such as `os.system`, is refused here, where nothing has called it yet.
    """
    try:
        kind = find(path)
    except Unimportable as error:
        raise unusable(key, f"{path} cannot be imported: {error}") from error.__cause__
    inherit = "inherit from resilient_train.recover.remedies.Remedy"
    if not isinstance(kind, type):
        raise unusable(key, f"{path} is not a remedy: it is a {type(kind).__name__}, not a class; {inherit}")
    lacking = [what for what in ("applies", "apply", "undo") if not callable(getattr(kind, what, None))]
    lacking += [what for what in ("name", "about") if not isinstance(getattr(kind, what, None), str)]
    if lacking:
        raise unusable(key, f"{path} is not a remedy: it lacks {', '.join(lacking)}; {inherit}")
    return kind


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Say that there is no such thing, what may have been meant, and what there is."""
    names = list(known)
    meant = similar(name, names)
    there = f"{meant} There" if meant else "; there"
    return f"no such {what} {name}{there} {'are' if len(names) > 1 else 'is'} {', '.join(names) or 'none'}"
