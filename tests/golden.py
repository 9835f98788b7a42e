"""Texts that are kept in files, so that each change of a sentence is seen: UPDATE_GOLDEN=1 writes them again."""

from __future__ import annotations

import os
from pathlib import Path

FILES = Path(__file__).with_name("golden")


def check(name: str, text: str) -> None:
    """Compare a text with the file of this name."""
    file = FILES / name
    if os.environ.get("UPDATE_GOLDEN"):
        FILES.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"{file} says something else: UPDATE_GOLDEN=1 writes it again"
