"""Makes the samples of a run, and its evaluation, of a data set of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from resilient_train.data.rows import Collate, Retries
from resilient_train.data.samples import MapSamples, Samples, Slicing, loader
from resilient_train.data.sequential import IterableSamples
from resilient_train.data.stream import Key, Stream
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import DataConfig
from resilient_train.processes.world import World

Weighted = tuple[Any, int]  # a batch and the number of its rows; 0 for a batch that only keeps ranks in step


class Evaluation:
    """Evaluation over a data set, in order, with the same random numbers every time."""

    def __init__(self, dataset: Any, config: DataConfig, slicing: Slicing, *, seed: int, collate: Collate) -> None:
        assert config.eval is not None
        key, path = "data.eval._target_", config.eval["_target_"]
        if not _is_map_style(dataset, key, path):
            raise ConfigError(key, path, "an evaluation needs rows with an index: give those of an iterable as a list")
        keys = [Key(seed, 0, row) for row in range(len(dataset))]
        self._plan, self._weights = _split(keys, slicing)
        self._loader = loader(dataset, self._plan, collate, num_workers=config.num_workers, pin_memory=False)

    def batches(self) -> Iterator[Weighted]:
        """Yield every batch. One that fails for a moment is fetched again in this process."""
        here: Any = self._loader.dataset
        batches = iter(self._loader)
        for keys, weight in zip(self._plan, self._weights, strict=True):
            retries = Retries()
            while True:
                try:
                    batch = here.collated(keys) if retries.pauses else next(batches)
                    break
                except Exception as error:
                    retries.pause_or_raise(error, f"fetching {len(keys)} rows of an evaluation")
            yield batch, weight

    def close(self) -> None:
        del self._loader


def _split(items: Sequence[Any], slicing: Slicing) -> tuple[list[Sequence[Any]], list[int]]:
    """Give every rank the same number of batches: a forward with collectives hangs if one rank has fewer."""
    batches = [items[start : start + slicing.batch_size] for start in range(0, len(items), slicing.batch_size)]
    mine = batches[slicing.rank :: slicing.world]
    weights = [len(batch) for batch in mine]
    if len(mine) < -(-len(batches) // slicing.world):
        mine, weights = [*mine, batches[0]], [*weights, 0]
    return mine, weights


def samples(
    dataset: Any,
    slicing: Slicing,
    world: World,
    *,
    seed: int,
    collate: Collate,
    shuffle: bool,
    num_workers: int,
    name: str,
    key: str = "data",
) -> Samples:
    """`key` is what errors call the data set, which has a `name`."""
    if not _is_map_style(dataset, key, name):
        if not hasattr(dataset, "state_dict") or not hasattr(dataset, "load_state_dict"):
            why = "an iterable data set must be able to rewind: it needs state_dict and load_state_dict"
            raise ConfigError(key, name, why)
        if num_workers:
            why = "an iterable data set is read in the training process, where it can be rewound exactly"
            raise ConfigError(key, name, f"{why}: use num_workers=0")
        return IterableSamples(dataset, slicing, seed, collate, least=world.least)
    stream = Stream(len(dataset), seed, shuffle=shuffle)
    pins = world.device.type == "cuda"
    return MapSamples(dataset, stream, slicing, collate=collate, num_workers=num_workers, pin_memory=pins)


def _is_map_style(dataset: Any, key: str, path: str) -> bool:
    kind = type(dataset)
    if not isinstance(dataset, IterableDataset) and hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
        if len(dataset) == 0:
            raise ConfigError(key, path, "the data set is empty: it has no rows")
        return True
    if hasattr(kind, "__iter__"):
        return False
    needed = "a data set has __getitem__ and __len__, or __iter__ with state_dict and load_state_dict"
    raise ConfigError(key, path, f"gave a {kind.__name__}, which is not a data set: {needed}")
