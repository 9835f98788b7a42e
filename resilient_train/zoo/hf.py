"""Causal language models of transformers and data sets of datasets, which load on first use: the extra `hf`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from resilient_train.ground.reader import find


def hf_causal_lm(name: str, pretrained: bool = False, dtype: str = "float32", **overrides: Any) -> nn.Module:
    """Build a causal language model of transformers, with random weights or with `pretrained` ones.

    `name` is a model type (gpt2, llama, ...), a local folder, or a name on the Hugging Face hub; `overrides` are fields
    of its config. Weights become float32 unless `dtype` says otherwise: small updates vanish in bfloat16 weights.
    """
    import transformers

    is_type = not pretrained and name in transformers.CONFIG_MAPPING
    read = transformers.AutoConfig.for_model if is_type else transformers.AutoConfig.from_pretrained
    plain = read(name)
    for field in overrides:  # a config keeps any keyword, so a typo would silently train another model
        if not hasattr(plain, field):
            raise ValueError(f"model type {plain.model_type} has no field {field}")
    config = read(name, **{"use_cache": False, **overrides})  # cached keys and values are waste in training
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(name, config=config) if pretrained else auto.from_config(config)
    trained: nn.Module = model.to(getattr(torch, dtype)).train()  # from_pretrained returns a model in eval mode
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
    import datasets

    data: Any = datasets.load_dataset(**load_dataset)
    if isinstance(data, dict):  # DatasetDict and IterableDatasetDict
        raise ValueError(f"the data set has the splits {', '.join(data)}: pass split=... to choose one")
    if transform is not None:
        data = data.map(find("transform", transform) if isinstance(transform, str) else transform)
    if columns is not None:
        data = data.select_columns(list(columns))
    return data.with_format("torch")
