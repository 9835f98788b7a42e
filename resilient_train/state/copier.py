"""How a snapshot is filled: at once, or beside the next forward."""

from __future__ import annotations

import torch

from resilient_train.state.tree import copy_into, home, pinned

_BIG = 2**16  # bytes: less is not worth a stream of its own


class Copier:
    """Copies from where a run is to where its snapshots are.

    On an accelerator that is pinned host memory. What nothing but an optimizer changes, and is big, is copied on a
    stream of its own beside the next forward; the rest, which a forward or the loop may change at any moment, first
    and on the stream that everything else runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None  # recorded after the newest copy
        self._is_awaited = True
        self._sources: list[torch.Tensor] = []  # held: their memory must not go to others while it is being read

    def room(self, sources: list[torch.Tensor], old: list[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for copies of `sources`: tensors of `old`, which nobody needs any more, where they fit."""
        fitting: list[torch.Tensor] = []
        on_host = self._stream is None
        for source, one in zip(sources, old, strict=False):
            fits = one.shape == source.shape and one.dtype is source.dtype and (on_host or home(one) == source.device)
            fitting.append(one if fits else self.empty(source))
        return fitting + [self.empty(source) for source in sources[len(fitting) :]]

    def empty(self, source: torch.Tensor) -> torch.Tensor:
        """Memory for a copy of one tensor."""
        return pinned(source) if self._stream is not None and source.is_cuda else torch.empty_like(source)

    def fill(self, targets: list[torch.Tensor], sources: list[torch.Tensor], trained: int) -> None:
        """Copy; the first `trained` of the sources are changed by optimizers only."""
        if self._stream is None:
            copy_into(targets, sources)
            return
        self.before_change()
        beside = [place for place in range(trained) if sources[place].is_cuda and sources[place].nbytes >= _BIG]
        at_once = sorted(set(range(len(sources))) - set(beside))
        _enqueue([targets[place] for place in at_once], [sources[place] for place in at_once])
        self._stream.wait_stream(torch.cuda.current_stream())
        self._sources = [sources[place].detach() for place in beside]  # a weight may be given other memory
        with torch.cuda.stream(self._stream):
            _enqueue([targets[place] for place in beside], self._sources)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        self._is_awaited = False

    def before_change(self) -> None:
        """Let the device finish copying before the weights change; the host goes on."""
        if self._copied is not None and not self._is_awaited:
            torch.cuda.current_stream().wait_event(self._copied)
            self._is_awaited = True
            self._sources = []

    def wait(self) -> None:
        """Wait on the host until copies can be read."""
        if self._copied is not None:
            self._copied.synchronize()
        self.before_change()


@torch.no_grad()
def _enqueue(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
