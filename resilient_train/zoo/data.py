"""Map-style data sets that need no download: handwritten digits, Python's own source text, a random teacher's rows."""

from __future__ import annotations

import gzip
import importlib.util
import os
import sysconfig
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from resilient_train.zoo.models import at_least_one


def _check_split(split: str, eval_share: float = 0.5) -> None:
    if split not in ("train", "eval"):
        raise ValueError(f"split must be train or eval, got {split!r}")
    if not 0 < eval_share < 1:
        raise ValueError(f"eval_share must lie between 0 and 1, got {eval_share}")


def digits(split: str = "train", eval_share: float = 0.2, seed: int = 0) -> Dataset[tuple[Tensor, ...]]:
    """Load scikit-learn's 1,797 handwritten digits as rows (float image [1, 8, 8] in 0..1, label).

    `eval_share` and `seed` draw the line between the splits: give both splits the same.
    """
    _check_split(split, eval_share)
    found = importlib.util.find_spec("sklearn")  # not imported: that takes seconds, and its file is all we need
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the handwritten digits come with scikit-learn, which is not installed")
    with gzip.open(Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=","))
    pixels, labels = table[:, :-1], table[:, -1]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = round(len(order) * eval_share)
    rows = order[:held_out] if split == "eval" else order[held_out:]
    images = pixels.float().div_(16).view(-1, 1, 8, 8)
    return TensorDataset(images[rows], labels.long()[rows])


class PythonSource(Dataset[dict[str, Tensor]]):
    """Windows over the bytes of Python's standard library's source, as rows {"input_ids": LongTensor[context + 1]}.

    A window holds one token more than `context`: `language_model` feeds all but the last and predicts all but the
    first. Windows start every `stride` tokens, by default `context`, so that every token is predicted once.

    A file belongs to one split by a hash of its name, and files come in the order of that hash: any `max_bytes` of
    text is a fair sample. Other Python versions have other files, and so other rows.
    """

    def __init__(
        self,
        split: str = "train",
        context: int = 128,
        max_bytes: int = 4_000_000,
        eval_share: float = 0.1,
        stride: int | None = None,
    ) -> None:
        _check_split(split, eval_share)
        stride = context if stride is None else stride
        at_least_one(context=context, stride=stride)
        self.tokens = torch.frombuffer(_standard_library(split, eval_share, max_bytes), dtype=torch.uint8)
        self.starts = range(0, len(self.tokens) - context, stride)
        self.context = context
        if not self.starts:
            text = f"{len(self.tokens)} tokens of {split} text"
            raise ValueError(f"{text} hold no window of {context + 1}: raise max_bytes")

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.starts[index]
        return {"input_ids": self.tokens[start : start + self.context + 1].long()}


_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "pydoc_data", "encodings"}


def _standard_library(split: str, eval_share: float, max_bytes: int) -> bytearray:
    """Read up to `max_bytes` of the standard library's files that belong to the split."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[tuple[float, Path]] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_PROSE]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            digest = sha256(path.relative_to(root).as_posix().encode()).digest()
            files.append((int.from_bytes(digest[:6]) / 2**48, path))
    text = bytearray()
    for place, path in sorted(files):
        if (place < eval_share) == (split == "eval") and len(text) < max_bytes:
            text += path.read_bytes()
    return text[:max_bytes]


class Synthetic(Dataset[Any]):
    """Learnable rows from a fixed random teacher, each a pure function of (seed, split, index).

    `kind="classification"`: (float features, class), the largest score of a random two-layer network.
    `kind="regression"`: (float features, float target), the output of such a network, with a spread of about 1.
    `kind="tokens"`: {"input_ids": LongTensor[context + 1]} from a Markov chain with four successors to a token.

    `noise` is the spread of what is added to scores or target, or the share of tokens drawn blindly. All rows are made
    at once: 4,096 take some milliseconds, and no worker repeats the work.
    """

    def __init__(
        self,
        kind: str = "classification",
        rows: int = 4096,
        split: str = "train",
        features: int = 64,
        classes: int = 10,
        context: int = 64,
        vocab: int = 256,
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        _check_split(split)
        at_least_one(rows=rows, features=features, classes=classes, context=context, vocab=vocab)
        if seed < 0 or noise < 0:
            raise ValueError(f"seed and noise must not be negative, got seed={seed} and noise={noise}")
        # A stream of its own for everything drawn: more rows or noise then leave all other numbers what they were.
        stream = 1 if split == "train" else 3
        teacher, clean, noisy = (np.random.default_rng([seed, i]) for i in (9, stream, stream + 1))
        self.columns: tuple[Tensor, ...]
        if kind == "tokens":
            successors = teacher.integers(vocab, size=(vocab, 4))
            choices = clean.random((rows, context + 1))
            blind = noisy.random((rows, context + 1))
            share = min(noise, 1.0)
            ids = np.empty((rows, context + 1), dtype=np.int32)
            ids[:, 0] = choices[:, 0] * vocab
            for t in range(1, context + 1):
                follow = successors[ids[:, t - 1], (choices[:, t] * 4).astype(int)]
                # Among the draws below `share`, draw / share is uniform again: it says which token, too.
                anything = blind[:, t] / max(share, 1e-9) * vocab
                ids[:, t] = np.where(blind[:, t] < share, np.minimum(anything, vocab - 1), follow)
            self.columns = (torch.from_numpy(ids),)
        elif kind in ("classification", "regression"):
            outputs, hidden = (classes if kind == "classification" else 1), 32
            first = teacher.standard_normal((features, hidden), dtype=np.float32) / features**0.5
            second = teacher.standard_normal((hidden, outputs), dtype=np.float32) / hidden**0.5
            x = clean.standard_normal((rows, features), dtype=np.float32)
            # In float64, as the last bits of a product depend on how many rows it has. 0.63: the spread of the tanh.
            scores = (np.tanh(x.astype(np.float64) @ first) @ second / 0.63).astype(np.float32)
            scores += noise * noisy.standard_normal(scores.shape, dtype=np.float32)
            targets = scores.argmax(1) if kind == "classification" else scores[:, 0]
            self.columns = (torch.from_numpy(x), torch.from_numpy(targets))
        else:
            raise ValueError(f"kind must be classification, regression or tokens, got {kind!r}")

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...] | dict[str, Tensor]:
        row = tuple(column[index] for column in self.columns)
        return row if len(row) > 1 else {"input_ids": row[0].long()}
