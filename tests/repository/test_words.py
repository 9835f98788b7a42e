"""The English of what people read: README, pages, configuration, and every sentence of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTEAD = {  # patterns of words that are not used here, and what is
    r"\bgo(es)? on\b|\bgone on\b|\btak(e|es|en) up\b": "resume, continue",
    r"\bmade again\b": "retry",
    r"\brotten\b": "bad",
    r"\bwithout a word\b": "with no exit message",
    r"\bbeside\b": "next to",
    r"\banew\b": "again, from scratch",
    r"\bnobody\b|\bof nothing\b": "no, nothing",
    r"\bis wanted\b|\bare wanted\b": "expected",
    r"\btold\b(?! apart| otherwise| the run)|\btells\b": "says, reports, prints",
    r"\bwears?\b|\bplates?\b|\bsuits?\b|\bseams?\b": "patch",
    r"\bcouriers?\b|\bdelivers?\b|\bdelivered\b": "upload",
    r"\bstrangers?\b|\bof somebody's own\b": "user, the caller's loop",
    r"\bproven\b": "verified",
    r"\bhears? of\b|\bheard of\b": "notice, read",
    r"\bfor its sake\b|\bin the midst\b": "for it, in the middle",
}
NAMES = re.compile(r"_told|\"delivered\"|delivered=")  # keys on disk


def texts() -> Iterator[Path]:
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    yield from sorted((ROOT / "conf").rglob("*.yaml"))
    yield from sorted((ROOT / "resilient_train").rglob("*.py"))


def test_one_word_for_one_thing() -> None:
    """An engineer who has never seen the project understands each sentence at once."""
    found = []
    any_of_them = re.compile("|".join(INSTEAD), re.IGNORECASE)
    for path in texts():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if any_of_them.search(NAMES.sub("", line)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, f"say instead one of {', '.join(INSTEAD.values())}:\n" + "\n".join(found)
