"""Checkpoints made by hand: small good ones, and forged ones whose digests are right all the same."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from resilient_train.durable import journal
from resilient_train.durable.manifest import MANIFEST, VERIFIED, WEIGHTS, Entry, Manifest
from resilient_train.durable.store import Store
from resilient_train.durable.tree_files import TENSORS, TREE

CPU = torch.device("cpu")
FILES = (WEIGHTS, TENSORS, TREE)


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"head.weight": torch.full((3, 2), float(step)), "head.bias": torch.arange(3.0) + step}


def parts(step: int) -> dict[str, Any]:
    """Something like the state of a run after so many steps."""
    return {
        "weights": weights(step),
        "buffers": {"mean": torch.full((2,), 0.5 * step)},
        "clock": step,
        "optimizer.0": {"groups": [{"lr": 0.1}], "moments": {0: {"step": torch.tensor(float(step))}}, "shared": {}},
        "position": {"position": 4 * step},
        "random.python": random.Random(step).getstate(),
    }


def manifest(step: int, files: Any, *, kind: str = VERIFIED, tick: int | None = None) -> Manifest:
    return Manifest(
        kind=kind,
        step=step,
        tick=step if tick is None else tick,
        samples=4,
        each=4,
        effects={"tick": step, "skipped": [[8, 12]]},
        groups=[[{"lr": 0.1}]],
        files=dict(files),
    )


def write(store: Store, step: int, *, kind: str = VERIFIED, tick: int | None = None) -> Entry:
    """Write a small checkpoint the way a run does."""
    state = parts(step)
    exported = {**state["weights"], **state["buffers"]}
    memory = {"statistics": {}, "passed": [[step, 0.5]]}
    return store.write(manifest(step, {}, kind=kind, tick=tick), state, exported, memory)


def newest(store: Store) -> int | None:
    """The step of the checkpoint that a run would go on from, read whole; None where there is none."""
    for entry in store.usable():
        step = entry.step
        saved = Store.load(entry, CPU, weights(0))
        assert all(torch.equal(saved.parts["weights"][name], one) for name, one in weights(step).items())
        assert saved.parts["position"] == {"position": 4 * step}
        assert saved.parts["random.python"] == random.Random(step).getstate()
        assert saved.memory["passed"] == [[step, 0.5]]
        return step
    return None


def seal(checkpoint: Path, change: Callable[[dict[str, Any]], Any] = lambda node: None) -> None:
    """Make a manifest say of the files what they hold, as a forger does, after whatever `change` does to it."""
    file = checkpoint / MANIFEST
    node = json.loads(file.read_text(encoding="utf-8"))
    for name in FILES:
        path = checkpoint / name
        if path.is_file() and path.stat().st_size < 2**30:
            content = path.read_bytes()
            node["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    changed = change(node)
    node = node if changed is None else changed
    if isinstance(node, dict):
        node.pop("crc", None)
    file.unlink()
    file.write_bytes(journal.seal(json.dumps(node)) if isinstance(node, dict) else json.dumps(node).encode())
