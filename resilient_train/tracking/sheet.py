"""The paper that pictures for MLflow are drawn on: its colours, its words, and how it becomes a small file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

# A sheet of its own, with an edge: MLflow's pages are white or nearly black, and the picture is on either.
PAPER, EDGE, INK, FAINT, LINE = "#fcfbf7", "#b9b5aa", "#2b2a27", "#77726a", "#dedad0"
TINT = "#f6e5df"  # behind what was undone
GOOD, BAD, CURVE, GONE = "#2c7a4b", "#c22f1d", "#1f5fa8", "#a39d90"
FOOT, MIDDLE = 0.12, 0.43  # of the height: where the lower axes begin and end

# Inches. MLflow shows it in a square of which a small chart has the upper half: until it is clicked, that has to do.
_WIDTH, _HEIGHT, _DPI = 7.6, 7.4, 110
_STEP = 16  # from shade to shade: nearer ones are taken for each other, and a file of few colours is small


class Words(NamedTuple):
    """A sentence above the axes."""

    text: str
    lines: int = 1  # at most
    is_title: bool = False
    is_bold: bool = False
    ink: str = INK


def new_sheet(*above: Words, inches: tuple[float, float] = (_WIDTH, _HEIGHT)) -> tuple[Figure, float]:
    """Begin a picture with its words; return it, and the height where they end. No state of pyplot is involved."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=_DPI, facecolor=PAPER, edgecolor=EDGE, linewidth=3)
    FigureCanvasAgg(figure)
    height = 0.972
    for words in above:
        size, width = (12.5, 73) if words.is_title else (10.5, 92)
        weight = "bold" if words.is_title or words.is_bold else "normal"
        for line in _wrapped(words.text, width, words.lines):
            # Without mathtext: a stranger may have put a dollar into the name of a file.
            figure.text(
                0.03, height, line, fontsize=size, fontweight=weight, color=words.ink, va="top", parse_math=False
            )
            height -= size / 72 / _HEIGHT * 1.3
    return figure, height


def furnish(axes: Axes, name: str) -> None:
    """Give axes the colours of the sheet."""
    axes.set_facecolor(PAPER)
    axes.grid(True, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9.5, length=3)
    axes.set_ylabel(name, fontsize=10, color=FAINT)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(EDGE)
    axes.locator_params(axis="x", integer=True)


def name_ticks(axes: Axes) -> None:
    """Say what the lower edge counts."""
    axes.set_xlabel("tick: attempted updates", color=FAINT, fontsize=9.5, loc="right", labelpad=1)


def explain(figure: Figure, marks: Sequence[Artist]) -> None:
    """Name the marks, below all of it."""
    legend = figure.legend(
        handles=marks,
        loc="lower left",
        bbox_to_anchor=(0.02, 0.008),
        ncols=max(1, len(marks)),
        frameon=False,
        fontsize=9.5,
        columnspacing=1.4,
        handlelength=1.4,
    )
    for words in legend.get_texts():
        words.set_color(FAINT)


def finished(figure: Figure) -> Image:
    """Return the picture in few colours, which a file of some 25 kB holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = bytes(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    whole = Image.frombytes("RGBA", canvas.get_width_height(), pixels)
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in _palette() for part in colour])
    return whole.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)


def _palette() -> list[tuple[int, ...]]:
    """All inks, and what lies between them and the paper: chosen from a picture alone, a rare red would be lost."""
    from matplotlib.colors import to_rgb

    inks = [(ink, PAPER) for ink in (EDGE, INK, FAINT, LINE, TINT, GOOD, BAD, CURVE, GONE)]
    inks += [(ink, TINT) for ink in (LINE, GOOD, BAD, CURVE, GONE)]
    found: dict[tuple[int, ...], None] = {}
    for ink, ground in inks:
        pair = [[round(255 * part) for part in to_rgb(name)] for name in (ground, ink)]
        shades = max(1, max(abs(one - other) for one, other in zip(*pair, strict=True)) // _STEP)
        for at in range(shades + 1):
            found[tuple(round(one + (other - one) * at / shades) for one, other in zip(*pair, strict=True))] = None
    return list(found)


def _wrapped(words: str, width: int, lines: int) -> list[str]:
    """Break a sentence into lines; letters that the font has not become question marks."""
    known = "".join(one if one.isprintable() and ord(one) < 0x250 else "?" for one in " ".join(words.split()))
    return textwrap.wrap(known, width, max_lines=lines, placeholder=" ...")
