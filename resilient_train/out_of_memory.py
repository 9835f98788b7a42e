"""What an out-of-memory error is, and what it says."""

from __future__ import annotations

import torch

from resilient_train.errors import text_of

_ON_THE_HOST = ("can't allocate memory", "not enough memory", "std::bad_alloc")
_GIB = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether the memory of a device, or of the host, is used up."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in text_of(error) for words in _ON_THE_HOST)


def memory_evidence(error: BaseException, device: torch.device) -> str:
    """Return the message of an out-of-memory error in one line, on a GPU with the memory in use."""
    said = " ".join(text_of(error).split()).split(" Of the allocated memory")[0][:200] or type(error).__name__
    if device.type != "cuda":
        return said
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.max_memory_allocated(device)
    return f"{said}; at most {held / _GIB:.2f} GiB were in use, {free / _GIB:.2f} of {total / _GIB:.2f} GiB are free"
