"""The door to the checkpoints of a run: `python -m resilient_train checkpoints RUN_DIR`.

It reads every file of every checkpoint, says which of them are what was written, and changes and executes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resilient_train.checkpoint.manifest import CANDIDATE, DEMOTED, VERIFIED, Damaged, Manifest, verify
from resilient_train.checkpoint.store import Entry, Store
from resilient_train.checkpoint.weights import NotExportable, export, export_weights
from resilient_train.record.journal import JOURNAL, read
from resilient_train.wording import duration, printable

_HELP = """\
Lists the checkpoints of a run, the newest first, and reads each whole, to see whether it is what was written:
  verified    verified good: the updates after it were healthy, too
  candidate   left by a stop on request; a resume takes it, and finishes its proof
  demoted     trouble began before it: no resume takes it
  damaged     not what was written: no resume takes it"""
_ENDS = "ends with 0 if a run can be resumed, 1 if there are checkpoints and none can be, 2 if RUN_DIR is no directory"


@dataclass(frozen=True)
class Listed:
    """A checkpoint, and what reading all of it showed."""

    entry: Entry
    damage: str = ""

    @property
    def name(self) -> str:
        return self.entry.path.name

    @property
    def kind(self) -> str:
        return "damaged" if self.damage or self.entry.manifest is None else self.entry.manifest.kind

    @property
    def is_resumable(self) -> bool:
        """Say whether a resume would take it, if nothing newer were there."""
        return self.kind in (VERIFIED, CANDIDATE)

    @property
    def size(self) -> int:
        """The bytes of its files, by its manifest."""
        return sum(one.size for one in self.entry.manifest.files.values()) if self.entry.manifest else 0

    def as_dict(self) -> dict[str, Any]:
        """What a program wants to know."""
        manifest = self.entry.manifest
        said = ("step", "tick", "position", "world", "samples", "made_by", "at", "mlflow")
        return {
            "name": self.name,
            "path": str(self.entry.path),
            "kind": self.kind,
            "damage": self.damage or None,
            "bytes": self.size if manifest else None,
            **{key: getattr(manifest, key, None) for key in said},
        }

    def row(self, now: float) -> list[str]:
        """What a person wants to know."""
        manifest = self.entry.manifest
        if manifest is None:
            return [self.name, self.kind, "", "", "", self.damage]
        processes = f"{manifest.world} processes" if manifest.world > 1 else ""
        age = f"{duration(max(0.0, now - manifest.at / 1000))} old"
        return [self.name, self.kind, f"step {manifest.step:,}", spoken(self.size), age, self.damage or processes]


def main(arguments: list[str] | None = None) -> int:
    """List, verify, and export if asked to; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="resilient-train checkpoints",
        description=_HELP,
        epilog=_ENDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of the run, such as runs/NAME")
    parser.add_argument("--json", action="store_true", help="print one object for a program instead")
    folder = "make a new folder that from_pretrained of transformers loads, of the newest verified checkpoint"
    parser.add_argument("--export", type=Path, metavar="DIR", help=folder)
    whole = "write the weights of the newest verified checkpoint to a new safetensors file, for any program"
    parser.add_argument("--weights", type=Path, metavar="FILE", help=whole)
    parser.add_argument("--checkpoint", metavar="NAME", help="export this one, such as step-00000400")
    given = parser.parse_args(arguments)
    if given.checkpoint and not (given.export or given.weights):
        parser.error("--checkpoint says what to export: --export DIR or --weights FILE is missing")
    if given.export and given.weights:
        parser.error("--export and --weights are two things: one at a time")
    if not given.run_dir.is_dir():
        print(f"{given.run_dir} is no directory: expected the directory of a run, such as runs/NAME", file=sys.stderr)
        return 2
    if given.export:
        return _export(given.run_dir, given.checkpoint, given.export, partial(export, given.run_dir))
    if given.weights:
        return _export(given.run_dir, given.checkpoint, given.weights, export_weights)
    found = list(looked_at(Store(given.run_dir).entries()))
    taken = next((one.name for one in found if one.is_resumable), None)
    is_stuck = taken is None and (bool(found) or _were_written(given.run_dir))
    if given.json:
        checkpoints = [one.as_dict() for one in found]
        print(json.dumps({"run_dir": str(given.run_dir), "resume": taken, "checkpoints": checkpoints}))
    else:
        for line in _lines(given.run_dir, found, taken, is_stuck):
            print(printable(line))
    return 1 if is_stuck else 0


def looked_at(entries: Sequence[Entry]) -> Iterator[Listed]:
    """Read each checkpoint whole; one that a run at work has removed meanwhile is left out."""
    for number, entry in enumerate(entries, start=1):
        damage = entry.damage
        with _Progress(f"reading {entry.path.name} ({number} of {len(entries)}, {spoken(Listed(entry).size)})"):
            try:
                verify(entry.path)
            except Damaged as why:
                damage = str(why)
        if entry.path.exists() or entry.path.is_symlink():
            yield Listed(entry, damage)


def _were_written(run_dir: Path) -> bool:
    """Say whether the journal knows of a checkpoint: without any, a run begins at its first step."""
    try:
        return any(entry["kind"] == "checkpoint_saved" for entry in read(run_dir / JOURNAL))
    except OSError:
        return False


def _lines(run_dir: Path, found: Sequence[Listed], taken: str | None, is_stuck: bool) -> Iterator[str]:
    now = time.time()
    rows = [one.row(now) for one in found]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))] if rows else []
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if taken is not None:
        is_candidate = any(one.name == taken and one.kind == CANDIDATE for one in found)
        yield f"a resume would take {taken}" + (", and finish its proof" if is_candidate else "")
    elif is_stuck:
        what = "none of them" if found else "none: those that were written are gone"
        yield f"a resume would take {what}; run.resume=never starts anew beside this run"
    else:
        yield f"no checkpoints in {run_dir}: checkpoint.disk.every says how often they are written"


def _export(run_dir: Path, name: str | None, to: Path, make: Callable[[Path, Path], Manifest]) -> int:
    """Export the named checkpoint, or the newest verified one that is what was written."""
    entries = [one for one in Store(run_dir).entries() if name is None or one.path.name == name]
    if name is not None and not entries:
        there = ", ".join(one.path.name for one in Store(run_dir).entries()) or "none"
        print(printable(f"{run_dir} has no checkpoint {name}: there is {there}"), file=sys.stderr)
        return 2
    why = "there is no checkpoint"
    for entry in entries:
        kind = entry.manifest.kind if entry.manifest else ""
        if name is None and kind != VERIFIED:
            why = f"there is none that is verified good: --checkpoint {entry.path.name} exports that one all the same"
            continue
        try:
            with _Progress(f"copying {entry.path.name} ({spoken(Listed(entry).size)})"):
                manifest = make(entry.path, to)
        except Damaged as damage:
            why = f"{entry.path.name}: {damage}"
            print(printable(why), file=sys.stderr)
        except NotExportable as reason:
            print(printable(str(reason)), file=sys.stderr)
            return 1
        else:
            doubt = {CANDIDATE: " (its proof is not finished)", DEMOTED: " (trouble began before it)"}.get(kind, "")
            also = "; if it needs a tokenizer, save that there, too" if to.is_dir() else ""
            print(f"step {manifest.step:,}{doubt} is in {to}{also}")
            return 0
    print(printable(f"nothing was exported: {why}"), file=sys.stderr)
    return 1


class _Progress:
    """A line on a terminal for as long as something takes."""

    def __init__(self, what: str) -> None:
        self.what = what if sys.stderr.isatty() else ""

    def __enter__(self) -> None:
        if self.what:
            print(f"\r{printable(self.what)} ...", end="", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self.what:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def spoken(size: float) -> str:
    """Say a number of bytes as a person does: 48.6 MB."""
    units = iter(("bytes", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 1000 and (larger := next(units, None)):
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"
