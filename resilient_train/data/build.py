"""Makes the samples of a run, and its evaluation, of a data set of any kind."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from resilient_train.data.evaluation import IterableEvaluation, MapEvaluation
from resilient_train.data.rows import Collate
from resilient_train.data.samples import MapSamples, Samples, Slicing
from resilient_train.data.sequential import IterableSamples
from resilient_train.data.stream import Stream
from resilient_train.errors import ConfigError
from resilient_train.settings import DataConfig


def samples(
    dataset: Any, config: DataConfig, slicing: Slicing, *, seed: int, collate: Collate, pin_memory: bool
) -> Samples:
    """Make the samples of a training set."""
    key, path = "data.train._target_", config.train["_target_"]
    if not _is_map_style(dataset, key, path):
        lacks = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(dataset, name, None))]
        if lacks:
            why = f"an iterable data set must be able to rewind, and this {type(dataset).__name__} lacks"
            raise ConfigError(key, path, f"{why} {' and '.join(lacks)}")
        if config.num_workers:
            why = "an iterable data set is read in the training process, where it can be rewound exactly: use 0"
            raise ConfigError("data.num_workers", config.num_workers, why)
        try:
            return IterableSamples(dataset, slicing, seed=seed, collate=collate)
        except ValueError as error:
            raise ConfigError(key, path, str(error)) from error
    stream = Stream(len(dataset), seed, shuffle=config.shuffle)
    return MapSamples(dataset, stream, slicing, collate=collate, num_workers=config.num_workers, pin_memory=pin_memory)


def evaluation(
    dataset: Any, config: DataConfig, slicing: Slicing, *, seed: int, collate: Collate
) -> MapEvaluation | IterableEvaluation:
    """Split an evaluation set over the ranks."""
    assert config.eval is not None
    if not _is_map_style(dataset, "data.eval._target_", config.eval["_target_"]):
        return IterableEvaluation(dataset, slicing, seed=seed, collate=collate)
    return MapEvaluation(dataset, slicing, seed=seed, collate=collate, num_workers=config.num_workers)


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
