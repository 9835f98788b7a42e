"""`resilient-train checkpoints RUN_DIR`: list the checkpoints of a run, verify and export them.

It reads every file of every checkpoint; it changes nothing in the run directory and executes nothing from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resilient_train.checkpoint.store import CANDIDATE, DEMOTED, VERIFIED, Damaged, Entry, Store, verify
from resilient_train.checkpoint.weights import NotExportable, export, export_weights
from resilient_train.record.journal import JOURNAL, read
from resilient_train.wording import duration, printable

_HELP = """\
Lists the checkpoints of a run, the newest first, after reading all of each to verify it:
  verified    verified good: the updates after it were healthy, too
  candidate   written by a stop on request; a resume loads it and finishes verifying it
  demoted     the trouble began before it: no resume loads it
  damaged     differs from what was written: no resume loads it"""
_EXIT_CODES = "exit code: 0 if a run can resume, 1 if no checkpoint is usable, 2 if RUN_DIR is no directory"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, and what reading all of it showed."""

    entry: Entry
    damage: str = ""

    @property
    def name(self) -> str:
        return self.entry.path.name

    @property
    def kind(self) -> str:
        return "damaged" if self.damage or self.entry.manifest is None else self.entry.manifest.kind

    def as_dict(self) -> dict[str, Any]:
        """Return the output of `--json`."""
        manifest = self.entry.manifest
        fields = ("step", "tick", "position", "processes", "samples", "made_by", "at", "mlflow")
        return {
            "name": self.name,
            "path": str(self.entry.path),
            "kind": self.kind,
            "damage": self.damage or None,
            "bytes": _bytes(self.entry) if manifest else None,
            **{"world" if name == "processes" else name: getattr(manifest, name, None) for name in fields},
        }

    def row(self) -> list[str]:
        """Return the cells of its line in the list."""
        manifest = self.entry.manifest
        if manifest is None:
            return [self.name, self.kind, "", "", "", self.damage]
        processes = f"{manifest.processes} processes" if manifest.processes > 1 else ""
        age = f"{duration(max(0.0, time.time() - manifest.at / 1000))} old"
        return [self.name, self.kind, f"step {manifest.step:,}", _size(self.entry), age, self.damage or processes]


def main(arguments: list[str] | None = None) -> int:
    """List and verify, or export; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="resilient-train checkpoints",
        description=_HELP,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of the run, such as runs/NAME")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    folder = "export the newest verified checkpoint to a new folder, for from_pretrained of transformers"
    parser.add_argument("--export", type=Path, metavar="DIR", help=folder)
    file = "export the weights of the newest verified checkpoint to a new safetensors file"
    parser.add_argument("--weights", type=Path, metavar="FILE", help=file)
    parser.add_argument("--checkpoint", metavar="NAME", help="export this checkpoint, such as step-00000400")
    given = parser.parse_args(arguments)
    run_dir: Path = given.run_dir
    if given.checkpoint and not (given.export or given.weights):
        parser.error("--checkpoint needs --export DIR or --weights FILE")
    if given.export and given.weights:
        parser.error("--export and --weights cannot be used together")
    if not run_dir.is_dir():
        print(f"{run_dir} is no directory: expected the directory of a run, such as runs/NAME", file=sys.stderr)
        return 2
    if given.export or given.weights:
        return _export(run_dir, given)
    entries = list(Store(run_dir).entries())
    found = []
    for number, entry in enumerate(entries, start=1):
        damage = entry.damage
        with _progress(f"reading {entry.path.name} ({number} of {len(entries)}, {_size(entry)})"):
            try:
                verify(entry.path)
            except Damaged as why:
                damage = str(why)
        if entry.path.exists() or entry.path.is_symlink():  # else a running process has removed it meanwhile
            found.append(Checkpoint(entry, damage))
    resumes_from = next((one for one in found if one.kind in (VERIFIED, CANDIDATE)), None)
    is_stuck = resumes_from is None and (bool(found) or _were_written(run_dir))
    if given.json:
        name = resumes_from.name if resumes_from is not None else None
        checkpoints = [one.as_dict() for one in found]
        print(json.dumps({"run_dir": str(run_dir), "resume": name, "checkpoints": checkpoints}))
        return 1 if is_stuck else 0
    rows = [one.row() for one in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(printable("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()))
    if resumes_from is not None:
        proof = ", and finish verifying it" if resumes_from.kind == CANDIDATE else ""
        print(printable(f"a resume would load {resumes_from.name}{proof}"))
    elif is_stuck:
        what = "none of them" if found else "none: those that were written are gone"
        print(f"a resume would load {what}; run.resume=never starts a new run in a sibling directory")
    else:
        how = "checkpoint.disk.every, or disk= of a guard, sets how often they are written"
        print(printable(f"no checkpoints in {run_dir}: {how}"))
    return 1 if is_stuck else 0


def _were_written(run_dir: Path) -> bool:
    """Say whether the journal has a checkpoint: a run that never wrote one begins at its first step."""
    try:
        return any(entry["kind"] == "checkpoint_saved" for entry in read(run_dir / JOURNAL))
    except OSError:
        return False


def _export(run_dir: Path, given: argparse.Namespace) -> int:
    """Export the named checkpoint, or the newest verified one without damage."""
    name, to = given.checkpoint, given.export or given.weights
    make = partial(export, run_dir) if given.export else export_weights
    every = list(Store(run_dir).entries())
    entries = [one for one in every if name is None or one.path.name == name]
    if name is not None and not entries:
        there = ", ".join(one.path.name for one in every) or "none"
        print(printable(f"{run_dir} has no checkpoint {name}: there is {there}"), file=sys.stderr)
        return 2
    why = "there is no checkpoint"
    for entry in entries:
        kind = entry.manifest.kind if entry.manifest else ""
        if name is None and kind != VERIFIED:
            why = f"no checkpoint is verified: --checkpoint {entry.path.name} exports that one all the same"
            continue
        try:
            with _progress(f"copying {entry.path.name} ({_size(entry)})"):
                manifest = make(entry.path, to)
        except Damaged as damage:
            why = f"{entry.path.name}: {damage}"
            print(printable(why), file=sys.stderr)
        except NotExportable as reason:
            print(printable(str(reason)), file=sys.stderr)
            return 1
        else:
            doubt = {CANDIDATE: " (not verified yet)", DEMOTED: " (the trouble began before it)"}.get(kind, "")
            also = "; if it needs a tokenizer, save that there, too" if to.is_dir() else ""
            print(f"step {manifest.step:,}{doubt} is in {to}{also}")
            return 0
    print(printable(f"nothing was exported: {why}"), file=sys.stderr)
    return 1


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Show a line on a terminal while something takes time."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"\r{printable(what)} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _bytes(entry: Entry) -> int:
    return sum(one.size for one in entry.manifest.files.values()) if entry.manifest else 0


def _size(entry: Entry) -> str:
    """Return the size of a checkpoint's files for a person: 48.6 MB."""
    size, units = float(_bytes(entry)), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"
