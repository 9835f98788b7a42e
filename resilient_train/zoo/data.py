"""Map-style data sets that need no download: handwritten digits, Python's own source text, a random teacher's rows."""

from __future__ import annotations

import gzip
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

_HELD_OUT = 0.1  # of the files
_NOISE = 0.1  # spread of what is added to a teacher's scores


def digits(split: str = "train") -> TensorDataset:
    """Load scikit-learn's 1,797 handwritten digits as rows (float image [1, 8, 8] in 0..1, label)."""
    _check_split(split)
    found = importlib.util.find_spec("sklearn")  # not imported: that takes seconds, and its file is all we need
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the handwritten digits come with scikit-learn, which is not installed")
    with gzip.open(Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=","))
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    held_out = len(table) // 5
    rows = table[order[:held_out] if split == "eval" else order[held_out:]]
    return TensorDataset(rows[:, :-1].float().div(16).view(-1, 1, 8, 8), rows[:, -1].long())


def python_source(split: str = "train", context: int = 128, max_bytes: int = 4_000_000) -> TensorDataset:
    """Cut the bytes of Python's standard library's source into rows (uint8 tokens [context + 1],).

    The last token of a row is the first of the next one, so that every token is predicted once. A file belongs to one
    split by a hash of its name, and files come in the order of that hash: any `max_bytes` are a fair sample.
    """
    _check_split(split)
    text = bytearray()
    for place, path in sorted(_source_files(Path(sysconfig.get_paths()["stdlib"]))):
        if (place < _HELD_OUT) == (split == "eval") and len(text) < max_bytes:
            text += path.read_bytes()
    tokens = torch.frombuffer(text[:max_bytes], dtype=torch.uint8)
    return TensorDataset(tokens.unfold(0, context + 1, context))


_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "pydoc_data", "encodings"}


def _source_files(root: Path) -> Iterator[tuple[float, Path]]:
    """Yield the files below, each with its place between 0 and 1, which follows from its name."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_SOURCE]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            digest = sha256(path.relative_to(root).as_posix().encode()).digest()
            yield int.from_bytes(digest[:6]) / 2**48, path


def synthetic(
    rows: int = 4096,
    split: str = "train",
    features: int = 64,
    classes: int = 10,
    seed: int = 0,
) -> TensorDataset:
    """Make learnable rows (float features, class) of a fixed random teacher, the largest score of a two-layer network:
    the first ones are the same, however many there are.
    """
    _check_split(split)
    stream = 1 if split == "train" else 3
    teacher, clean, noisy = (np.random.default_rng([seed, number]) for number in (9, stream, stream + 1))
    hidden = 32
    first = teacher.standard_normal((features, hidden), dtype=np.float32) / features**0.5
    second = teacher.standard_normal((hidden, classes), dtype=np.float32) / hidden**0.5
    x = clean.standard_normal((rows, features), dtype=np.float32)
    # In float64, as the last bits of a product depend on how many rows it has. 0.63: the spread of the tanh.
    scores = (np.tanh(x.astype(np.float64) @ first) @ second / 0.63).astype(np.float32)
    scores += _NOISE * noisy.standard_normal(scores.shape, dtype=np.float32)
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(scores.argmax(1)))


def _check_split(split: str) -> None:
    if split not in ("train", "eval"):
        raise ValueError(f"split must be train or eval, got {split!r}")
