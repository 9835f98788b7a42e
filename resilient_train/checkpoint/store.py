"""The checkpoints of a run: written as a whole or not at all, verified before they are believed, pruned, demoted.

checkpoints/step-00000400/manifest.json         what it is of, and the sha256 of the others
                         /weights.safetensors   weights and buffers by their own names, for any program;
                         /tensors.safetensors   all other tensors
                         /tree.json             all other values
                         /share-00000-of-00002.safetensors   where they are spread over ranks, instead what each has
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from resilient_train import files
from resilient_train.checkpoint import manifest as manifests
from resilient_train.checkpoint import safetensors_files as shares
from resilient_train.checkpoint.manifest import (
    CANDIDATE,
    DEMOTED,
    MANIFEST,
    UNKNOWN_FORMAT,
    VERIFIED,
    WEIGHTS,
    Damaged,
    Manifest,
)
from resilient_train.checkpoint.safetensors_files import NAMES, Together, chunks
from resilient_train.checkpoint.tree_files import Planned, load_tree
from resilient_train.files import Written, commit_directory, commit_text, remove, sweep, temporary, write_file

CHECKPOINTS = "checkpoints"  # its name in a run directory

_NAME = re.compile(r"step-(\d{8,18})(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint on disk, and what its manifest says; or why it says nothing."""

    path: Path
    manifest: Manifest | None
    damage: str = ""

    @classmethod
    def of(cls, path: Path) -> Entry:
        """Read the manifest of a checkpoint."""
        try:
            return cls(path, manifests.read(path))
        except Damaged as why:
            return cls(path, None, str(why))

    @property
    def is_usable(self) -> bool:
        """Say whether a run may go on from it, as far as its manifest tells."""
        return self.manifest is not None and self.manifest.kind != DEMOTED

    @property
    def manifest_step(self) -> int:
        """Its step, by its manifest."""
        return self.manifest.step if self.manifest is not None else 0


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds."""

    parts: dict[str, Any]  # of the run's state, as a snapshot has them
    memory: dict[str, Any]  # what does not rewind, and is gone with a process


class Store:
    """The directory of a run's checkpoints."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CHECKPOINTS

    def entries(self) -> list[Entry]:
        """List what is there, the latest first; files are not read, so damage shows only in manifests.

        What says nothing of its tick comes before all that are of no later step: it is told rather than missed.
        """
        found: list[Entry] = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.path.iterdir():
                if _NAME.fullmatch(path.name):
                    found.append(Entry.of(path))
        entries = sorted((one for one in found if one.manifest is not None), key=_age, reverse=True)
        for lost in sorted((one for one in found if one.manifest is None), key=_age):
            steps = [one.manifest_step if one.manifest is not None else -1 for one in entries]
            at = next((at for at, step in enumerate(steps) if step <= _age(lost)[1]), len(entries))
            entries.insert(at, lost)
        return entries

    def usable(self) -> Iterator[Entry]:
        """The entries that a run may go on from, the latest first."""
        return (one for one in self.entries() if one.is_usable)

    def write(
        self,
        describe: Callable[[dict[str, Written]], Manifest],
        parts: Mapping[str, Any],
        exported: Mapping[str, torch.Tensor],
        memory: Mapping[str, Any],
        together: Together | None = None,
    ) -> Entry:
        """Write a checkpoint and commit it. Its manifest is made by `describe`, of what is in its files.

        `exported` are the tensors for other programs: weights that are among them are not written twice. `together`
        with other ranks, which call `write_share`, rank 0 calls this and waits for them.
        """
        usual = {name: one for name, one in exported.items() if one.dtype in NAMES}
        planned = Planned(_tree(parts, usual, memory))
        beside = self._beside(together)
        try:
            written = planned.write(beside)
            if together is None:
                written[WEIGHTS] = write_file(beside / WEIGHTS, chunks(usual))
            else:
                began = time.monotonic()
                shares.write(beside, together, lambda: planned.spread)
                written |= shares.gathered(beside, together, time.monotonic() - began)
            manifest = describe(written)
            write_file(beside / MANIFEST, [manifest.text().encode()])
            path = self._free(manifest.step)
            commit_directory(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(beside)
            raise
        return Entry(path, manifest)

    def write_share(self, parts: Callable[[], Mapping[str, Any]], together: Together) -> None:
        """Write what a rank other than 0 holds of a checkpoint."""
        beside = temporary(self.path / f"new-{together.label}")
        shares.write(beside, together, lambda: Planned(_tree(parts(), {}, {})).spread)

    @staticmethod
    def load(
        entry: Entry, device: torch.device, weights: Mapping[str, torch.Tensor], *, is_verified: bool = False
    ) -> Saved:
        """Read a checkpoint whose files are what was written; `weights` are those of the model. Raises Damaged.

        `is_verified`: rank 0 has read it through and found it so.
        """
        manifest = manifests.verify(entry.path, is_read=not is_verified)
        try:
            tree = load_tree(entry.path, device)
            exported = load_file(entry.path / WEIGHTS) if WEIGHTS in manifest.files else {}
        except (ValueError, OSError, SafetensorError) as error:
            raise Damaged(f"cannot be loaded: {' '.join(str(error).split())[:200]}") from error
        match tree:
            case {"parts": dict(parts), "memory": dict(memory)} if len(tree) == 2 and isinstance(
                parts.get("weights"), dict
            ):
                if parts.get("clock") != manifest.step:
                    raise Damaged("holds the state of another step than it says")
                there = {name: exported[name] for name in weights if name in exported}
                return Saved({**parts, "weights": {**there, **parts["weights"]}}, memory)
        raise Damaged("holds no state of a run")

    def mark(self, entry: Entry, kind: str) -> Entry:
        """Say something else about a checkpoint: that it is proven now, or not to be trusted."""
        assert entry.manifest is not None
        manifest = entry.manifest.of_kind(kind)
        commit_text(entry.path / MANIFEST, manifest.text())
        return Entry(entry.path, manifest)

    def demote(self, since: int) -> list[Entry]:
        """Mark what is newer than the newest step to be trusted."""
        newer = [one for one in self.usable() if one.manifest is not None and one.manifest.step > since]
        return [self.mark(one, DEMOTED) for one in newer]

    def prune(self, keep: int, keep_every: int, reference: int | None = None) -> None:
        """Let old ones go; what is not verified goes once something newer is. What cannot be removed stays."""
        entries = self.entries()
        verified = [one for one in entries if one.manifest is not None and one.manifest.kind == VERIFIED]
        if not verified:
            return
        kept = {one.path for one in verified[:keep]}
        if reference is not None:  # the run is not back where it was there
            kept |= {one.path for one in [one for one in verified if one.manifest_step <= reference][:1]}
        kept |= {one.path for one in verified if keep_every and one.manifest and not one.manifest.step % keep_every}
        kept |= {one.path for one in entries[: entries.index(verified[0])] if not one.damage and _is_candidate(one)}
        for one in entries:
            if one.path not in kept and not one.damage.startswith(UNKNOWN_FORMAT):  # a newer version may read it
                with contextlib.suppress(OSError):
                    hidden = temporary(one.path)  # a removal that is cut short leaves no half checkpoint
                    files.disk.rename(one.path, hidden)
                    remove(hidden)

    def sweep(self) -> None:
        """Remove what kills have left behind."""
        sweep(self.path.resolve())  # somebody may have given it another disk
        for entry in self.entries():
            sweep(entry.path)

    def _beside(self, together: Together | None) -> Path:
        """Make the directory in which a checkpoint is written before it has a name: rank 0 does it for all."""
        if not self.path.is_dir():
            files.disk.make_directory(self.path)
            files.sync_directory(self.path.parent)
        beside = temporary(self.path / ("new" if together is None else f"new-{together.label}"))
        if together is not None:
            sweep(self.path.resolve())  # of one that failed another rank may have left something
        elif beside.exists():
            remove(beside)
        files.disk.make_directory(beside)
        return beside

    def _free(self, step: int) -> Path:
        """A name that is not taken: after a rewind a run comes to the same step again."""
        path, number = self.path / f"step-{step:08}", 2
        while path.exists():
            path, number = self.path / f"step-{step:08}.{number}", number + 1
        return path


def _tree(parts: Mapping[str, Any], exported: Mapping[str, torch.Tensor], memory: Mapping[str, Any]) -> Any:
    rest = {name: one for name, one in parts["weights"].items() if name not in exported}
    return {"parts": {**parts, "weights": rest}, "memory": dict(memory)}


def _age(entry: Entry) -> tuple[int, int, str]:
    """By tick, which never goes back; of what says nothing, by its name."""
    if entry.manifest is not None:
        return entry.manifest.tick, entry.manifest.step, entry.path.name
    match = _NAME.fullmatch(entry.path.name)
    step = int(match[1]) if match else 0
    return step, step, entry.path.name


def _is_candidate(entry: Entry) -> bool:
    return entry.manifest is not None and entry.manifest.kind == CANDIDATE
