"""Programs of people who have never heard of us: models, data sets and losses as they are found in the wild."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Jittery(nn.Module):
    """Dropout and BatchNorm: a forward that draws and that changes buffers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Plain(nn.Module):
    """Nothing random, nothing that depends on how a batch is cut."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Augmented(Dataset[dict[str, Any]]):
    """Rows with random numbers of all three kinds in them; `index` tells which row it is."""

    def __init__(self, rows: int = 37) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(4)
        x = torch.tensor([random.random(), np.random.random(), *noise.tolist()], dtype=torch.float32)
        return {"x": x + 0.01 * index, "y": x.sum().reshape(1), "index": index}


class RarelyRandom(Augmented):
    """Draws for one row in seven only."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 7 == 0:
            return super().__getitem__(index)
        x = torch.full((6,), float(index))
        return {"x": x, "y": x.sum().reshape(1), "index": index}


class Fixed(Dataset[tuple[Tensor, Tensor]]):
    """Never draws."""

    def __init__(self, rows: int = 64) -> None:
        numbers = torch.Generator().manual_seed(7)
        self.x = torch.randn(rows, 6, generator=numbers)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Counting:
    """An iterable that says where it stands and goes back there, with random numbers in its rows."""

    def __init__(self, rows: int = 23) -> None:
        self.rows, self.at = rows, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < self.rows:
            self.at += 1
            x = torch.rand(6) + random.random() + float(np.random.random())
            yield {"x": x, "y": x.sum().reshape(1), "index": self.at - 1}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Forgetful:
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(6)


def mse(model: nn.Module, batch: Any) -> Tensor:
    x, y = (batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch
    return nn.functional.mse_loss(model(x), y)


def mse_and_more(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = mse(model, batch)
    return loss, {"rmse": loss.detach().sqrt()}


def no_scalar(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(batch[0])
    return out


def no_graph(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch).detach()


def raises(model: nn.Module, batch: Any) -> Tensor:
    raise RuntimeError("the loss function of the user broke")


def one_argument(batch: Any) -> Any:
    return batch


def nothing() -> list[int]:
    return []


def number() -> int:
    return 3


def frozen() -> nn.Module:
    return Plain().requires_grad_(False)


class BatchEncodings(Fixed):
    """Rows for the habits of Hugging Face."""


def batchencodings_collate(rows: list[tuple[Tensor, Tensor]]) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])})


def batchencodings_loss(model: nn.Module, batch: Any) -> Tensor:
    assert type(batch).__name__ == "BatchEncoding"
    return nn.functional.mse_loss(model(batch["x"]), batch.y)


class NestedRows(Fixed):
    """Rows that are nests of tuples and dicts."""


def nestedrows_collate(rows: list[tuple[Tensor, Tensor]]) -> Any:
    x, y = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
    return {"inputs": ({"left": x[:, :3]}, [x[:, 3:]]), "meta": "a word", "target": y}


def nestedrows_loss(model: nn.Module, batch: Any) -> Tensor:
    (left, right), y = batch["inputs"], batch["target"]
    return nn.functional.mse_loss(model(torch.cat([left["left"], right[0]], 1)), y)


class Witness(Plain):
    saw: dict[str, float]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body[0](x)
        self.saw = {
            "autocast": float(hidden.dtype == torch.bfloat16),
            "compiled": float(torch.compiler.is_compiling()),
            "deterministic": float(torch.are_deterministic_algorithms_enabled()),
        }
        out: Tensor = self.body[2](self.body[1](hidden))
        return out


def witnessed(model: Witness, batch: Any) -> tuple[Tensor, dict[str, float]]:
    loss = mse(model, batch)
    return loss, model.saw


class Lengthy(Counting, torch.utils.data.IterableDataset[dict[str, Any]]):
    """An iterable of torch's own kind that knows its length."""

    def __len__(self) -> int:
        return self.rows


def sometimes_rare(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A metric that one rank has and another one has not."""
    loss = mse(model, batch)
    return loss, {"rare": loss.detach()} if int(batch["index"][0]) % 2 else {}


def with_a_vector(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return mse(model, batch), {"each": batch[0].mean(1)}


def with_a_loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, float]]:
    return mse(model, batch), {"loss": 1.0}


def leaves(model: nn.Module, batch: Any) -> Tensor:
    raise SystemExit(0)


class Rotten(Fixed):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise ValueError(f"row {index} is rotten")


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return mse(model, batch) * self.scale


def without_a_rate(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Optimizer(params, {})


class Given(Fixed):
    def __init__(self, token: str = "") -> None:
        super().__init__()
        self.token = token


class Leaky(Given):
    """Two of its rows cannot be fetched, and say with what password and token it was tried."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in (3, 20):
            raise OSError(f"no answer from s3://reader:s3cr3tpass@bucket/rows?token=s3cr3tpass&row={index}")
        return super().__getitem__(index)


def leaks(model: nn.Module, batch: Any) -> Tensor:
    """Ends the run with an error of its own, that was caused by another."""
    try:
        raise ConnectionError("cannot log in: password=s3cr3tpass")
    except ConnectionError as error:
        raise RuntimeError("postgresql://writer:s3cr3tpass@db/losses") from error


class RaisesLater:
    """An objective that has enough after forty updates."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls > 40:
            raise RuntimeError("it has had enough")
        return mse(model, batch)
