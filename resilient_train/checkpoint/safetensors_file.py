"""The safetensors format, written in pieces: by the library a file is held in memory once more before it is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

_PIECE = 2**22  # bytes: so much is hashed and written at a time, without Python's lock

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def chunks(
    tensors: Mapping[str, torch.Tensor], told: Mapping[str, str] = MappingProxyType({})
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: the length of its header, the header, and the tensors, the widest types first.

    `told` is for people: words beside the names.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **told}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        data = _bytes(tensors[name])
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # a single element counts as contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else memoryview(b"")
