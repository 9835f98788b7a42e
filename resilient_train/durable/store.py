"""The checkpoints of a run: written completely or not at all, verified before use, demoted, and removed.

checkpoints/step-00000400/manifest.json         which state it holds, and the sha256 of the other files
                         /weights.safetensors   weights and buffers by their own names, for any program;
                         /tensors.safetensors   all other tensors
                         /tree.json             all other values
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from resilient_train.durable.endings import CHECKPOINTS, DEMOTED_END
from resilient_train.durable.journal import seal, unseal
from resilient_train.durable.tree_files import NAMES, SerializedTree, chunks, load_tree
from resilient_train.durable.tree_files import gathered as gathered_tree
from resilient_train.ground import files
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.wording import log

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
VERIFIED, CANDIDATE, DEMOTED = "verified", "candidate", "demoted"


_FORMAT = 6
_NAME = re.compile(r"step-(\d{8,18})(-\d+)?(\.demoted)?")


class Damaged(ValueError):
    """A checkpoint is not what was written. The message is one line."""


@dataclass(frozen=True, slots=True)
class Manifest:
    kind: str  # verified; candidate: not verified yet
    step: int
    tick: int
    samples: int  # of an update, over all processes and micro-batches
    each: int  # samples of a process, as configured; samples / world, unless the number of processes changed
    made_by: str
    effects: dict[str, Any]  # of remedies: knobs, skipped samples, patched lines, rows in quarantine
    groups: list[Any]  # the configured settings of each optimizer's parameter groups
    files: dict[str, dict[str, Any]]  # size and digest of each


def read(checkpoint: Path) -> Manifest:
    """Read only the manifest of a checkpoint. Raises Damaged."""
    with _cannot_be_read(MANIFEST):
        node = unseal((checkpoint / MANIFEST).read_bytes().removesuffix(b"\n"))
    if node is None or node.pop("format", None) != _FORMAT:
        raise Damaged(f"{MANIFEST} is damaged, or of another version")
    try:
        return Manifest(**node)
    except TypeError as error:
        raise Damaged(f"{MANIFEST} is not a manifest") from error


def verify(checkpoint: Path) -> Manifest:
    """Compare the files of a checkpoint with its manifest. Raises Damaged."""
    manifest = read(checkpoint)
    for name, written in manifest.files.items():
        with _cannot_be_read(name), open(checkpoint / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                raise Damaged(f"{name} is not what was written")
    return manifest


@contextlib.contextmanager
def _cannot_be_read(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint on disk: its manifest, or why that cannot be read. The other files may be damaged all the same."""

    path: Path
    manifest: Manifest | None
    damage: str = ""

    @classmethod
    def of(cls, path: Path) -> Entry:
        try:
            return cls(path, read(path))
        except Damaged as why:
            return cls(path, None, str(why))

    @property
    def kind(self) -> str:
        if self.manifest is None:
            return ""
        return DEMOTED if self.path.suffix == DEMOTED_END else self.manifest.kind

    @property
    def step(self) -> int:
        return self.manifest.step if self.manifest is not None else 0

    @property
    def is_usable(self) -> bool:
        return self.kind in (VERIFIED, CANDIDATE)

    @property
    def age(self) -> tuple[bool, int, int, str]:
        """The tick, which never goes back, then step and name. Without a manifest it comes first, to be reported."""
        tick = self.manifest.tick if self.manifest is not None else 0
        return self.manifest is None, tick, self.step, self.path.name


@dataclass(frozen=True, slots=True)
class Saved:
    parts: dict[str, Any]  # the state of the run, as a snapshot has it
    memory: dict[str, Any]  # what does not rewind, but has to survive the end of a process


class Store:
    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CHECKPOINTS

    def entries(self) -> list[Entry]:
        """List all checkpoints, the latest first; only manifests are read."""
        paths: list[Path] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            paths += [path for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(map(Entry.of, paths), key=lambda one: one.age, reverse=True)

    def usable(self) -> list[Entry]:
        return [one for one in self.entries() if one.is_usable]

    def write(
        self,
        manifest: Manifest,
        parts: Mapping[str, Any],
        exported: Mapping[str, torch.Tensor],
        memory: Mapping[str, Any],
    ) -> Entry:
        """Write a checkpoint, read it back, and commit it unless it differs. Weights among `exported`, the tensors for
        other programs, are not written twice.
        """
        rest = {name: part for name, part in parts.items() if name != "weights"}
        tree = SerializedTree({"parts": rest, "memory": dict(memory)})
        if not self.path.is_dir():
            files.disk.make_directory(self.path)
            files.sync_directory(self.path.parent)
        new = files.temporary(self.path / "new")
        if new.exists():
            files.remove(new)
        files.disk.make_directory(new)
        try:
            written = tree.write(new) | {WEIGHTS: files.write_file(new / WEIGHTS, chunks(exported))}
            manifest = replace(manifest, files=written)
            files.write_file(new / MANIFEST, [seal(json.dumps({"format": _FORMAT, **asdict(manifest)}))])
            verify(new)
            names = files.siblings(self.path / f"step-{manifest.step:08}")  # a run comes to a step again after a rewind
            path = next(one for one in names if not (one.exists() or _demoted(one).exists()))
            files.sync_directory(new)
            files.disk.rename(new, path)
            files.sync_directory(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                files.remove(new)
            raise
        return Entry(path, manifest)

    @staticmethod
    def load(entry: Entry, device: torch.device, weights: Mapping[str, torch.Tensor]) -> Saved:
        """Verify a checkpoint and read it; `weights` are those of the model. Raises Damaged."""
        manifest = verify(entry.path)
        try:
            tree = load_tree(entry.path, device)
            exported = load_file(entry.path / WEIGHTS)
        except (ValueError, OSError, SafetensorError) as error:
            raise Damaged(f"cannot be loaded: {' '.join(str(error).split())[:200]}") from error
        match tree:
            case {"parts": dict(parts), "memory": dict(memory)} if parts.get("clock") == manifest.step:
                there = {name: exported[name] for name in weights if name in exported}
                return Saved({**parts, "weights": there}, memory)
        raise Damaged("does not hold the state of a run")

    def demote(self, since: int) -> None:
        """Rename the checkpoints after `since`, the newest step to trust: that takes no room on a full disk."""
        for one in self.usable():
            if one.step > since:
                with contextlib.suppress(FileNotFoundError):  # it was pruned meanwhile
                    files.disk.rename(one.path, _demoted(one.path))
                log.info("the checkpoint %s is demoted: it is removed once a later one is verified", one.path.name)
                files.sync_directory(self.path)

    def prune(self, keep: int, keep_every: int, reference: int | None = None) -> None:
        """Remove old checkpoints, and others once a newer one is verified; keep the newest until step `reference`."""
        entries = self.entries()
        verified = [one for one in entries if one.kind == VERIFIED]
        if not verified:
            return
        kept = verified[:keep]
        kept += [one for one in verified if keep_every and not one.step % keep_every]
        if reference is not None:  # the loss is not back where it was there
            kept += [one for one in verified if one.step <= reference][:1]
        kept += [one for one in entries[: entries.index(verified[0])] if one.kind == CANDIDATE]
        for one in entries:
            if one not in kept:
                with contextlib.suppress(OSError):  # it stays until the next time
                    hidden = files.temporary(one.path)  # an interrupted removal leaves no half checkpoint
                    files.disk.rename(one.path, hidden)
                    files.remove(hidden)

    def sweep(self) -> None:
        files.sweep(self.path)


def _demoted(path: Path) -> Path:
    return path.with_name(path.name + DEMOTED_END)


_PIECE = 2**22  # bytes that are copied at a time


def gathered(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """All weights and persistent buffers of an unwrapped model, full ones. All ranks call this for a sharded model."""
    return gathered_tree(_tensors(model), keep=keep)  # type: ignore[no-any-return]


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file; leave out, and name, what it cannot hold."""
    if odd := [f"{name} ({str(one.dtype)[6:]})" for name, one in sorted(tensors.items()) if one.dtype not in NAMES]:
        log.warning("%s has no %s: safetensors have no such types", path, ", ".join(odd))
    files.commit(path, chunks({name: one for name, one in tensors.items() if one.dtype in NAMES}))


@torch.no_grad()
def load_into(model: nn.Module, source: Path, key: str = "run.init_from") -> None:
    """Load the weights of a file, a checkpoint or a run into `model`; all names and shapes must be the same."""
    try:
        saved = load_file(source / WEIGHTS if source.is_dir() else source)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(key, source, f"has no weights that can be read: {error}") from error
    own = _tensors(model)
    for name in [*own, *sorted(saved.keys() - own.keys())]:
        theirs, ours = (list(some[name].shape) if name in some else "missing" for some in (saved, own))
        if theirs != ours:
            why = f"does not fit the model: {name} is {theirs} there, and {ours} in the model"
            raise ConfigError(key, source, why)
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights and persistent buffers of a model by name; tied ones once, under their first name."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


class NotExportable(ValueError):
    """There is nothing to export, or the target cannot be written. The message is one line."""


def export_weights(checkpoint: Path, to: Path) -> Manifest:
    """Copy the weights of a checkpoint to a new file. Raises NotExportable or Damaged."""
    if to.exists():
        raise NotExportable(f"{to} is there already: --weights makes a new file")
    manifest = verify(checkpoint)
    try:
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        with open(checkpoint / WEIGHTS, "rb") as file:
            files.commit(to, iter(partial(file.read, _PIECE), b""))
    except OSError as error:
        raise NotExportable(f"{to} cannot be written: {error.strerror or error}") from error
    return manifest
