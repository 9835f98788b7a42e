"""Lines for a person: wrapped and coloured on a terminal, each whole and plain in a pipe."""

from __future__ import annotations

import os
import sys
from typing import IO

from rich.console import Console
from rich.text import Text

from resilient_train.secrets import masked
from resilient_train.wording import printable

_LEAST = 20  # columns: on anything narrower lines are longer than the terminal

Words = str | tuple[str, str]  # as they are, or in a style


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process with 1


class Page:
    """What is printed to a terminal, or to a pipe."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file or sys.stdout
        colours = None if os.environ.get("NO_COLOR") else "auto"
        self._console = _Console(file=self._file, color_system=colours, highlight=False, soft_wrap=True)  # type: ignore[arg-type]
        self.width = max(_LEAST, self._console.width) if self._console.is_terminal else None

    def line(self, *words: Words, indent: int = 0, hang: int | None = None) -> None:
        """Print one line; where it is wrapped, what follows begins `hang` columns from the left."""
        text = Text(" " * indent)
        for one in words:
            said, style = (one, "") if isinstance(one, str) else one
            text.append(printable(masked(said)), style)
        if self.width is None:
            self._print(text)
            return
        hang = min(indent if hang is None else hang, self.width // 2)
        first, rest = text, Text()
        if len(text.wrap(self._console, self.width)) > 1:
            first, rest = _parted(text, self.width, self._console)
        self._print(first)
        for part in rest.wrap(self._console, self.width - hang) if rest else ():
            self._print(Text(" " * hang).append_text(part))

    def blank(self) -> None:
        """Leave a line empty."""
        self._print(Text())

    def _print(self, text: Text) -> None:
        text.rstrip()
        if self.width is None:
            print(text.plain, file=self._file, flush=True)
        else:
            self._console.print(text)


def _parted(text: Text, width: int, console: Console) -> tuple[Text, Text]:
    """The first line of a text, and what is left of it."""
    first = text.wrap(console, width)[0]
    rest = text[len(first.plain) :]
    spaces = len(rest.plain) - len(rest.plain.lstrip())
    return first, rest[spaces:]
