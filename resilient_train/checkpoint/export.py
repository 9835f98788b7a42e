"""A folder that `from_pretrained` of transformers loads, made of a checkpoint by copying.

What such a folder says of its model is written by the run itself, as it alone has the model: pretrained/config.json
and, where the model generates, pretrained/generation_config.json. An export adds the weights and builds nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from resilient_train import files
from resilient_train.checkpoint.manifest import Damaged, Manifest, verify
from resilient_train.checkpoint.safetensors_file import chunks
from resilient_train.checkpoint.shares import is_share
from resilient_train.checkpoint.weights import WEIGHTS, stored
from resilient_train.errors import in_one_line
from resilient_train.files import commit, commit_directory, commit_text, remove, temporary, write_file
from resilient_train.state.sharded import own_class

PRETRAINED = "pretrained"  # its name in a run directory

_CONFIG, _GENERATION, _MODEL = "config.json", "generation_config.json", "model.safetensors"
_MOST_BYTES = 2**24  # of a file of JSON
_PIECE = 2**22


class NotExportable(ValueError):
    """There is nothing to export, or no place for it. The message is one line for a person."""


def describe(model: nn.Module, run_dir: Path) -> None:
    """Write down what `from_pretrained` needs to know of a model of transformers; of any other nothing."""
    transformers = sys.modules.get("transformers")  # where it is not loaded, no model is of it
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    dtypes = {weight.dtype for weight in model.parameters()}
    dtype = str(dtypes.pop() if len(dtypes) == 1 else torch.float32).removeprefix("torch.")
    config = {**model.config.to_dict(), "architectures": [own_class(model).__name__], "dtype": dtype}
    told: dict[str, dict[str, Any]] = {_CONFIG: config}
    if getattr(model, "generation_config", None) is not None:
        told[_GENERATION] = model.generation_config.to_dict()
    place = run_dir / PRETRAINED
    place.mkdir(exist_ok=True)
    for name, node in told.items():
        commit_text(place / name, json.dumps(node, indent=2, sort_keys=True, default=str) + "\n")


def export(run_dir: Path, checkpoint: Path, to: Path) -> Manifest:
    """Make a new folder of a checkpoint that verifies. Raises NotExportable or Damaged."""
    if not (run_dir / PRETRAINED).is_dir():
        why = f"is for models of transformers, and this run's is none: {checkpoint / WEIGHTS} loads with safetensors"
        raise NotExportable(f"--export {why}")
    if to.is_symlink() or (to.exists() and not to.is_dir()) or (to.is_dir() and any(to.iterdir())):
        raise NotExportable(f"{to} is there already: --export makes a new folder")
    told = {_CONFIG: _json(run_dir / PRETRAINED / _CONFIG)}
    if (run_dir / PRETRAINED / _GENERATION).exists():
        told[_GENERATION] = _json(run_dir / PRETRAINED / _GENERATION)
    manifest = verify(checkpoint)
    beside = temporary(to)
    try:
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        if beside.exists():
            remove(beside)
        files.disk.make_directory(beside)
        for name, content in told.items():
            write_file(beside / name, [content])
        if any(map(is_share, manifest.files)):
            write_file(beside / _MODEL, chunks(_whole(checkpoint)))
        elif write_file(beside / _MODEL, _pieces(checkpoint / WEIGHTS)) != manifest.files[WEIGHTS]:
            raise Damaged(f"{WEIGHTS} changed while it was copied")
        commit_directory(beside, to)
    except OSError as error:
        raise NotExportable(f"{to} cannot be written: {error.strerror or error}") from error
    finally:
        if beside.exists():
            remove(beside)
    return manifest


def export_weights(checkpoint: Path, to: Path) -> Manifest:
    """Make one safetensors file of a checkpoint that verifies, whoever has written it. As `export`."""
    if to.is_symlink() or to.exists():
        raise NotExportable(f"{to} is there already: --weights makes a new file")
    manifest = verify(checkpoint)
    try:
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        commit(to, chunks(_whole(checkpoint)))
    except OSError as error:
        raise NotExportable(f"{to} cannot be written: {error.strerror or error}") from error
    return manifest


def _whole(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Put together what several ranks have written."""
    try:
        return stored(checkpoint)
    except (ValueError, SafetensorError) as error:
        raise Damaged(f"cannot be loaded: {in_one_line(error)}") from error


def _json(file: Path) -> bytes:
    """What a file holds, if that is an object in JSON."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) <= _MOST_BYTES and isinstance(json.loads(content), dict):
            return content
    except (OSError, ValueError, RecursionError):
        pass
    raise NotExportable(f"{file} is not what a run writes there")


def _pieces(file: Path) -> Iterator[bytes]:
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        while piece := opened.read(_PIECE):
            yield piece
