"""`resilient-train checkpoints RUN_DIR`: read all of every checkpoint to verify it, or export the newest."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from resilient_train.command import no_run, parser_of
from resilient_train.command.terminal import print_line
from resilient_train.durable.endings import CHECKPOINTS, is_run
from resilient_train.durable.journal import JOURNAL
from resilient_train.durable.manifest import CANDIDATE, DEMOTED, VERIFIED, WEIGHTS, Damaged, Entry, entries_of, verify
from resilient_train.durable.run_history import history_of

_HELP = """\
Lists the checkpoints of a run, the newest first, after reading all of each to verify it:
  verified    verified good: the updates after it were healthy, too
  candidate   written by a stop on request; a resume loads it and finishes verifying it
  demoted     the trouble began before it: no resume loads it
  damaged     differs from what was written: no resume loads it"""
_EXIT_CODES = """0 if a run can resume or none was written, 1 if no checkpoint is usable, 2 if no run is there;
of --weights: 1 if nothing was exported"""


def main(words: list[str]) -> int:
    parser = parser_of("checkpoints", _HELP, _EXIT_CODES)
    file = "export the weights of the newest verified checkpoint to a new safetensors file"
    parser.add_argument("--weights", type=Path, metavar="FILE", help=file)
    given = parser.parse_args(words)
    run_dir: Path = given.run_dir
    if not (is_run(run_dir) or (run_dir / JOURNAL).exists() or (run_dir / CHECKPOINTS).is_dir()):
        return no_run(run_dir)
    return _export(run_dir, given.weights) if given.weights else _list(run_dir)


def _list(run_dir: Path) -> int:
    found: list[tuple[Entry, str, str]] = []  # kind and damage, after reading all of it
    for entry in entries_of(run_dir):
        damage = entry.damage
        try:
            verify(entry.path)
        except Damaged as why:
            damage = str(why)
        if entry.path.exists():  # else a running process has removed it meanwhile
            found.append((entry, "damaged" if damage else entry.kind, damage))
    resume, kind = next(((one.path.name, kind) for one, kind, _ in found if kind in (VERIFIED, CANDIDATE)), (None, ""))
    are_demoted = bool(found) and all(kind == DEMOTED for _, kind, _ in found)
    is_stuck = resume is None and not are_demoted and (bool(found) or history_of(run_dir).has_saved)
    for one in found:
        print_line(_line(*one))
    if resume is not None:
        print_line(f"a resume would load {resume}{', and finish verifying it' if kind == CANDIDATE else ''}")
    elif is_stuck:
        print_line("a resume would find none of those that were written; run.resume=never starts a new run")
    else:
        print_line("a resume would begin at step 0: no checkpoint is to be trusted, or none was written")
    return 1 if is_stuck else 0


def _line(entry: Entry, kind: str, damage: str) -> str:
    manifest = entry.manifest
    if entry.damage:
        return f"{entry.path.name}  {kind}  {damage}"
    size = sum(one["bytes"] for one in manifest.files.values()) / 1e6
    return f"{entry.path.name}  {kind}  step {manifest.step:,}  {size:,.2f} MB  {damage}"


def _export(run_dir: Path, to: Path) -> int:
    """Export the newest verified checkpoint without damage; a candidate only if none is verified."""
    if to.exists():
        print(f"{to} is there already: --weights makes a new file", file=sys.stderr)
        return 1
    usable = [one for one in entries_of(run_dir) if one.is_usable]
    for entry in sorted(usable, key=lambda one: one.kind != VERIFIED):
        try:
            manifest = verify(entry.path)
            to.absolute().parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(entry.path / WEIGHTS, to)
        except Damaged as damage:
            print(f"{entry.path.name}: {damage}", file=sys.stderr)
        except OSError as error:
            print(f"{to} cannot be written: {error.strerror or error}", file=sys.stderr)
            return 1
        else:
            print(f"step {manifest.step:,}{' (not verified yet)' if entry.kind == CANDIDATE else ''} is in {to}")
            return 0
    print("nothing was exported: no checkpoint is usable", file=sys.stderr)
    return 1
