"""What a steady step asks of torch, of the host and of other processes: counts, which do not vary from run to run."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COUNTED = 50  # steps: whole cycles of the scans and of the snapshots
KINDS = ("torch calls", "host reads", "collectives", "bytes in collectives")
# Methods by which a tensor gets to the host. On a CPU `tolist` and `numpy` reach no kernel, so kernels do not tell.
READS = ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__float__", "__int__", "__index__")
_READING_KERNELS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Count all that this process asks for inside."""
    with _Kernels(counts) as kernels, _reads_counted(counts, kernels):
        yield


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own says nothing of types
    """Counts what reaches torch's kernels, forward, backward and optimizer alike, and the reads among it."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.inside_read = False  # a method that was counted already

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.counts["collectives"] += 1
            tensors = [one for one in tree_leaves(args[0]) if isinstance(one, torch.Tensor)]
            self.counts["bytes in collectives"] += sum(one.nbytes for one in tensors)
        else:
            self.counts["torch calls"] += 1
        reads = func.overloadpacket.__name__ in _READING_KERNELS
        if reads and not self.inside_read and _lives_on_device(args[0]):
            self.counts["host reads"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _reads_counted(counts: Counter[str], kernels: _Kernels) -> Iterator[None]:
    """Wrap the methods of tensors that read."""

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if kernels.inside_read or not _lives_on_device(tensor):
                return method(tensor, *args, **kwargs)
            counts["host reads"] += 1
            kernels.inside_read = True
            try:
                return method(tensor, *args, **kwargs)
            finally:
                kernels.inside_read = False

        return read

    own = {name: vars(torch.Tensor).get(name) for name in READS}
    for name in READS:
        setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _lives_on_device(tensor: Any) -> bool:
    """Tell what a GPU run keeps there from the whole numbers of the host: orders of rows, states of generators."""
    return not tensor.is_cpu or tensor.is_floating_point() or tensor.dtype == torch.bool
