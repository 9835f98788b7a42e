"""Any causal language model of transformers and any data set of datasets; both packages load on first use only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from resilient_train.reader import Unimportable, find, similar


def hf_causal_lm(
    name: str | None = None, path: str | None = None, pretrained: bool = False, dtype: str = "float32", **overrides: Any
) -> nn.Module:
    """Build a causal language model of transformers, with random weights or with `pretrained` ones.

    `name` is a model type (gpt2, llama, ...) or a name on the Hugging Face hub; `path`, a local folder, goes before it.
    A model type with `pretrained` means the hub's model of that name. Everything else overrides a field of the config.
    Weights become float32 unless `dtype` says otherwise, however they are stored: small updates vanish in bfloat16
    weights, and mixed precision is the accelerator's job.
    """
    transformers = _package("transformers")
    source = path or name
    if source is None:
        raise ValueError("hf_causal_lm needs a name or a path")
    if path is not None and not Path(path, "config.json").is_file():
        raise ValueError(f"path={path} is not a folder with a config.json")
    width = getattr(torch, dtype, None)
    if not isinstance(width, torch.dtype) or not width.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype such as float32 or bfloat16, got {dtype}")

    types = transformers.CONFIG_MAPPING
    is_type = path is None and not pretrained and source in types
    read = transformers.AutoConfig.for_model if is_type else transformers.AutoConfig.from_pretrained
    auto = transformers.AutoModelForCausalLM
    try:
        plain = read(source)
        for key in overrides:  # a config keeps any keyword, so a typo would silently train another model
            if not hasattr(plain, key):
                raise ValueError(f"model type {plain.model_type} has no field {key!r}{similar(key, plain.to_dict())}")
        config = read(source, **{"use_cache": False, **overrides})  # cached keys and values are waste in training
        model = auto.from_pretrained(source, config=config) if pretrained else auto.from_config(config)
    except Exception as error:  # its errors have no class in common
        hint = "" if source in types else similar(source, types)
        raise ValueError(f"transformers cannot build {source!r}: {_shortened(error)}{hint}") from error
    trained: nn.Module = model.to(width).train()  # from_pretrained returns a model in eval mode
    return trained


def hf_dataset(
    columns: Sequence[str] | None = None,
    transform: str | Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    **load_dataset: Any,
) -> Any:
    """Load one split with `datasets.load_dataset(**load_dataset)`, as rows of tensors.

    `transform`, a function of one row or its import path, runs first (once, then cached; row by row when streaming);
    `columns` then picks what a row keeps. `streaming=True` gives an iterable data set with its own state_dict.
    """
    datasets = _package("datasets")
    path = transform
    if isinstance(path, str):
        try:
            transform = find(path)
        except Unimportable as error:
            raise ValueError(f"transform={path} cannot be imported: {error}") from error
    if transform is not None and not callable(transform):
        raise ValueError(f"transform={path} is a {type(transform).__name__}, not a function of a row")
    try:
        data = datasets.load_dataset(**load_dataset)
    except Exception as error:
        raise ValueError(f"datasets cannot load {load_dataset.get('path')!r}: {_shortened(error)}") from error
    if isinstance(data, dict):  # DatasetDict and IterableDatasetDict
        raise ValueError(f"the data set has the splits {', '.join(data)}: pass split=... to choose one")
    if transform is not None:
        data = data.map(transform)
    if columns is not None:
        present = data.column_names or columns  # None if a streamed data set does not know them yet
        if missing := sorted({*columns} - {*present}):
            raise ValueError(f"the data set has no columns {', '.join(missing)}; it has {', '.join(present)}")
        data = data.select_columns(list(columns))
    return data.with_format("torch")


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:240]


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # a dependency of the package is missing
        raise ValueError(f"this needs the package {name}: pip install 'resilient-train[hf]'") from error
