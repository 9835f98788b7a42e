"""A checkpoint is written whole or not at all, believed only if every byte is as written, and let go of in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forged_checkpoints import CPU, FILES, manifest, newest, parts, weights, write
from safetensors.torch import load_file

from resilient_train.core.state import Clock, RunState
from resilient_train.durable import manifest as manifests
from resilient_train.durable.manifest import CANDIDATE, MANIFEST, VERIFIED, WEIGHTS
from resilient_train.durable.resume import explain_mismatch
from resilient_train.durable.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def steps(store: Store) -> list[int]:
    return [entry.step for entry in store.entries()]


# Written and read.


def test_what_is_loaded_is_what_was_written(store: Store) -> None:
    """Weights, all other parts and the memory come back to the last bit."""
    entry = write(store, 7)
    assert entry.manifest == manifests.verify(entry.path) == manifest(7, entry.manifest.files)
    assert newest(store) == 7
    loaded = Store.load(entry, CPU, weights(7)).parts
    assert torch.equal(loaded["optimizer.0"]["moments"][0]["step"], torch.tensor(7.0))
    assert loaded.keys() == parts(7).keys()


def test_weights_open_with_plain_safetensors(store: Store) -> None:
    """Under their own names, buffers too; and nothing of it is written twice."""
    entry = write(store, 7)
    tensors = load_file(entry.path / WEIGHTS)
    assert tensors.keys() == {"head.weight", "head.bias", "mean"}
    assert torch.equal(tensors["head.bias"], weights(7)["head.bias"])
    assert sorted(path.name for path in entry.path.iterdir()) == sorted([*FILES, MANIFEST])


def test_the_latest_tick_is_the_newest(store: Store) -> None:
    """After a rewind a lesser step is the newer one; a step that comes again gets a name of its own."""
    for step, tick in ((10, 10), (20, 20), (15, 30), (20, 40)):
        write(store, step, tick=tick)
    assert steps(store) == [20, 15, 20, 10]
    assert store.entries()[0].path.name == "step-00000020-2"


# Let go of.


@pytest.mark.parametrize(
    ("there", "keep", "every", "left"),
    [
        ("v10 v20 v30", 2, 0, [30, 20]),
        ("v10 v20 v30", 1, 0, [30]),
        ("v10 v20 v30", 9, 0, [30, 20, 10]),
        ("v10 v20 v30 v40", 1, 20, [40, 20]),
        ("v10 v20 c30", 1, 0, [30, 20]),  # what is not proven does not push out what is
        ("v10 c20 v30", 1, 0, [30]),
        ("v10 v20 d30", 1, 0, [20]),
        ("c10 c20", 1, 0, [20, 10]),
        ("d10", 1, 0, [10]),
        ("v10 d20 c30 c40", 1, 0, [40, 30, 10]),
        ("v10 x20 v30", 3, 0, [30, 10]),  # without a manifest
    ],
)
def test_older_ones_go_once_a_newer_one_is_proven(
    store: Store, there: str, keep: int, every: int, left: list[int]
) -> None:
    """`keep` of the proven ones stay, those of every so many steps, and candidates that are newer than all of them."""
    for word in there.split():
        entry = write(store, int(word[1:]), kind=CANDIDATE if word[0] == "c" else VERIFIED)
        if word[0] == "d":
            store.demote(entry.step - 1)
        if word[0] == "x":
            (entry.path / MANIFEST).unlink()
    store.prune(keep, every)
    assert steps(store) == left


# Whether it fits.


class _Position:
    def state_dict(self) -> dict[str, int]:
        return {"position": 3}

    def load_state_dict(self, state: Any) -> None: ...


def made(kind: str = "AdamW") -> tuple[torch.nn.Module, torch.optim.Optimizer, RunState]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    return model, optimizer, RunState(model, [optimizer], [], _Position(), Clock(), device=CPU)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Rprop"])
def test_the_state_of_the_run_itself_always_fits(kind: str) -> None:
    """Before the first update a run has no moments yet, and those of a checkpoint fit all the same."""
    model, optimizer, old = made(kind)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    _, _, fresh = made(kind)
    assert explain_mismatch(fresh.live(), old.live()) == ""
    assert explain_mismatch(old.live(), fresh.live()) == ""


def with_group(optimizer: dict[str, Any]) -> dict[str, Any]:
    return {**optimizer, "groups": [*optimizer["groups"], {}]}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda parts: {"weights": parts["weights"] | {"0.weight": torch.zeros(3)}}, "0.weight is torch.float32 [3] "),
        (lambda parts: {"kept.other": 1}, "kept.other is a part there and missing here"),
        (lambda parts: {"optimizer.0": with_group(parts["optimizer.0"])}, "it has 2 parameter groups there and 1 here"),
        (lambda parts: {"optimizer.0": {"x": 1}}, "it does not have the structure of a state"),
    ],
)
def test_the_state_of_another_run_does_not_fit(other: Any, why: str) -> None:
    """It is refused in one line before anything of it is taken."""
    live = made()[2].live()
    said = explain_mismatch(live, live | other(live))
    assert said.startswith(why)
    assert "\n" not in said
