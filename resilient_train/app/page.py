"""Lines for a person: wrapped and coloured on a terminal, each whole and plain in a pipe."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.text import Text

from resilient_train.secrets import masked
from resilient_train.wording import printable

_LEAST = 20  # columns: lines are wider than a narrower terminal

Words = str | tuple[str, str]  # plain, or with a style


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process with 1


class Page:
    """What is printed to a terminal, or to a pipe."""

    def __init__(self) -> None:
        self._file = sys.stdout
        colours = None if os.environ.get("NO_COLOR") else "auto"
        self._console = _Console(file=self._file, color_system=colours, highlight=False, soft_wrap=True)  # type: ignore[arg-type]
        self.width = max(_LEAST, self._console.width) if self._console.is_terminal else None

    def line(self, *words: Words, indent: int = 0, hang: int | None = None) -> None:
        """Print one line, or an empty one; if it is wrapped, the rest begins `hang` columns from the left."""
        text = Text(" " * indent)
        for one in words:
            part, style = (one, "") if isinstance(one, str) else one
            text.append(printable(masked(part)), style)
        text.rstrip()
        if self.width is None:
            print(text.plain, file=self._file, flush=True)
            return
        hang = min(indent if hang is None else hang, self.width // 2)
        while True:
            line = text.wrap(self._console, self.width)[0] if text else text
            text = text[len(line.plain) :]
            line.rstrip()
            self._console.print(line)
            if not text:
                return
            text = Text(" " * hang) + text[len(text.plain) - len(text.plain.lstrip()) :]
