"""The checkpoints of a run: written completely or not at all, verified before use, demoted, and removed.

checkpoints/step-00000400/manifest.json         which state it holds, and the sha256 of the other files
                         /weights.safetensors   weights and buffers by their own names, for any program;
                         /tensors.safetensors   all other tensors
                         /tree.json             all other values
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from resilient_train.durable.endings import CHECKPOINTS, DEMOTED_END
from resilient_train.durable.manifest import (
    CANDIDATE,
    MANIFEST,
    VERIFIED,
    WEIGHTS,
    Damaged,
    Entry,
    Manifest,
    entries_of,
    sealed,
    verify,
)
from resilient_train.durable.tree_files import NAMES, SerializedTree, chunks, load_tree
from resilient_train.durable.tree_files import gathered as gathered_tree
from resilient_train.ground import files
from resilient_train.ground.errors import ConfigError, in_one_line
from resilient_train.ground.wording import log


@dataclass(frozen=True, slots=True)
class Saved:
    parts: dict[str, Any]  # the state of the run, as a snapshot has it
    memory: dict[str, Any]  # what does not rewind, but has to survive the end of a process


class Store:
    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CHECKPOINTS

    def entries(self) -> list[Entry]:
        return entries_of(self.path.parent)

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
            files.write_file(new / MANIFEST, [sealed(manifest)])
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
    own = _tensors(model)
    try:
        saved = load_file(source / WEIGHTS if source.is_dir() else source)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(key, source, f"has no weights that can be read: {in_one_line(error)}") from error
    here, there = ({name: one.shape for name, one in some.items()} for some in (own, saved))
    if odd := sorted({*here.items()} ^ {*there.items()}):
        raise ConfigError(key, source, f"has no weights that fit the model: {odd[0][0]} is missing or of another shape")
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights and persistent buffers of a model by name; tied ones once, under their first name."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}
