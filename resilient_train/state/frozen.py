"""Weights that training leaves alone: one copy serves all snapshots, for as long as they are what was copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass
class _Shared:
    weight: torch.Tensor
    version: int
    digest: int
    copy: torch.Tensor | None = None  # None until a snapshot needs it


class Frozen:
    """Knows which frozen weights are still what they were, and holds the copies of those.

    Frozen does not mean constant: teachers and target networks are updated by the loop. A weight that was once seen
    to change is copied for every snapshot from then on, like a trained one.
    """

    def __init__(self) -> None:
        self._shared: dict[str, _Shared] = {}
        self._moving: set[str] = set()

    def moving(self, weights: Mapping[str, torch.Tensor]) -> set[str]:
        """Name the frozen ones among `weights` that change; what is left is the same as at the last snapshot.

        The contents decide, not only the version: the usual `target.data.mul_(0.99)` counts none. Reading the
        digests waits for the device, once a snapshot and only where weights are frozen and were never seen to change.
        """
        frozen = {name: weight for name, weight in weights.items() if not weight.requires_grad}
        self._shared = {name: one for name, one in self._shared.items() if name in frozen}
        self._moving |= {name for name, weight in frozen.items() if not _is_plain(weight)}
        still = [name for name in frozen if name not in self._moving]
        for name, digest in zip(still, _digests([frozen[name] for name in still]), strict=True):
            weight, known = frozen[name], self._shared.get(name)
            if known is None:
                self._shared[name] = _Shared(weight, weight._version, digest)
            elif known.weight is not weight or (known.version, known.digest) != (weight._version, digest):
                del self._shared[name]
                self._moving.add(name)
        return frozen.keys() & self._moving

    def copies(
        self, empty: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return the shared copies by name, and of those still to be filled a list, and one of what goes into them."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        copies: dict[str, torch.Tensor] = {}
        for name, one in self._shared.items():
            if one.copy is None:
                one.copy = empty(one.weight)
                targets.append(one.copy)
                sources.append(one.weight)
            copies[name] = one.copy
        return copies, targets, sources

    def names(self) -> list[str]:
        """Name the weights whose copy is shared."""
        return list(self._shared)

    def restored(self) -> None:
        """Take note that a snapshot was written over the weights: new versions, and no news of their contents."""
        for one in self._shared.values():
            one.version = one.weight._version

    def clear(self) -> None:
        """Let go of the copies."""
        self._shared.clear()


def _digests(weights: list[torch.Tensor]) -> list[int]:
    """Sums of the bits of each, taken where they lie and read in one go."""
    if not weights:
        return []
    digests = [_digest(weight.detach()) for weight in weights]
    return [int(one) for one in torch.stack([one.to(digests[0].device) for one in digests]).tolist()]


def _is_plain(weight: torch.Tensor) -> bool:
    """Say whether a digest can be taken: not of sparse tensors, nor of classes that hide where their bits are."""
    return weight.layout is torch.strided and type(weight.detach()) is torch.Tensor


def _digest(weight: torch.Tensor) -> torch.Tensor:
    """Add up a tensor as whole numbers of eight bytes, ten times faster than as ones of four, and what is left over."""
    order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    octets = weight.permute(order).reshape(-1).view(torch.uint8)  # no copy of a dense tensor, whatever its order
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    return octets[:whole].view(torch.int64).sum() + octets[whole:].sum(dtype=torch.int64)
