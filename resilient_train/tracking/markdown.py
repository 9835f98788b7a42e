"""Any words as markdown that shows just these words, in MLflow's description and in other readers.

Readers differ in their syntax: MLflow shows descriptions with Showdown, which also knows emoji and addresses, and
artifacts with another one. What means something to any of them becomes an entity or gets a backslash, what cannot be
printed becomes a question mark, and a line stays a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from resilient_train.wording import printable

_DOTS = "..."
_MARKS = {one: f"\\{one}" for one in "*_[]~"}
_MARKS |= {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {one: f"&#{ord(one)};" for one in "|`\\@$¨"}
_SYNTAX = re.compile(r":(?!\d\d:\d\d\b)(?=//|[^\s:]*:)|(?<=\bwww)\.|^[#+=-]|^\d(?=\d*[.)])", re.IGNORECASE)
_PLAIN_CODE = re.compile(r"[^`|\\¨]+")
_HARMLESS_URL = re.compile(r"[\w#?&=%./:;,+~-]+")
_LONGEST_URL = 400
_GAP = "&ensp; | "


def text(raw: str, most: int | None = None) -> str:
    """Show words as they are, in at most `most` characters of markdown."""
    return _within(_marked(_line(raw)), most)


def code(raw: str, most: int | None = None) -> str:
    """Show a name or a path as code; of one that is too long the end, which names the file."""
    raw = _line(raw).strip()
    if not _PLAIN_CODE.fullmatch(raw):
        return _within(_marked(raw), most, keep_end=True)
    room = len(raw) if most is None else max(most - 2, 0)
    return f"`{raw if len(raw) <= room else _DOTS + raw[len(raw) - room + len(_DOTS) :].lstrip()}`"


def worded(raw: str, most: int | None = None) -> str:
    """Show a sentence in which names stand between backticks."""
    parts = _line(raw).split("`")
    if len(parts) % 2:
        shown = "".join(code(one) if at % 2 else "".join(_marked(one)) for at, one in enumerate(parts))
        if most is None or len(shown) <= most:
            return shown
    return _within(_marked("".join(parts)), most)


def link(label: str, url: str | None, most: int | None = None) -> str:
    """Show words as a link, or as text where the address holds anything but the characters of one."""
    if url is None or len(url) > _LONGEST_URL or not _HARMLESS_URL.fullmatch(url):
        return text(label, most)
    return f"[{text(label, most)}]({url})"


def image(label: str, url: str) -> str:
    """Show a picture, or its words where it cannot be loaded."""
    return f"!{link(label, url)}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Put cells, which are markdown already, into a table; MLflow shows it without lines and margins."""
    lines = [_GAP.join(titles), "|".join(["---"] * len(titles)), *map(_GAP.join, rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _line(raw: str) -> str:
    """Return one line, without control characters."""
    return printable(" ".join(raw.split()))


def _marked(line: str) -> list[str]:
    """Return the markdown of each character."""
    syntax = {found.start() for found in _SYNTAX.finditer(line)}
    return [f"&#{ord(one)};" if at in syntax else _MARKS.get(one, one) for at, one in enumerate(line)]


def _within(marks: list[str], most: int | None, *, keep_end: bool = False) -> str:
    if most is None or sum(map(len, marks)) <= most:
        return "".join(marks)
    kept: list[str] = []
    room = most - len(_DOTS)
    for mark in reversed(marks) if keep_end else marks:
        room -= len(mark)
        if room < 0:
            break
        kept.append(mark)
    return _DOTS + "".join(reversed(kept)).lstrip() if keep_end else "".join(kept).rstrip() + _DOTS
