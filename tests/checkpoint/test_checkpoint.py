"""A checkpoint is written whole or not at all, believed only if every byte is as written, and let go of in order."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forged_checkpoints import CPU, FILES, manifest, newest, parts, weights, write
from safetensors.torch import load, load_file

from resilient_train.core.state import Clock, RunState
from resilient_train.durable import store as manifests
from resilient_train.durable import writer
from resilient_train.durable.resume import explain_mismatch
from resilient_train.durable.store import CANDIDATE, MANIFEST, VERIFIED, WEIGHTS, Entry, Store
from resilient_train.durable.tree_files import NAMES, chunks
from resilient_train.ground import files


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def steps(store: Store) -> list[int]:
    return [entry.step for entry in store.entries()]


# Written and read.


def test_what_is_loaded_is_what_was_written(store: Store) -> None:
    """Weights, all other parts and the memory come back to the last bit."""
    entry = write(store, 7)
    assert entry.manifest is not None
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
    assert store.entries()[0].path.name == "step-00000020.2"


def test_what_has_another_name_is_no_checkpoint(store: Store) -> None:
    """Nor is a directory that was never finished."""
    write(store, 7)
    for name in ("step-7", "step-00000008.old", "notes", ".new.resilient-tmp"):
        (store.path / name).mkdir()
    assert steps(store) == [7]
    assert Store(store.path / "nowhere").entries() == []


# Believed only as it was written.


def test_the_manifest_is_read_back_to_the_byte(store: Store) -> None:
    """The same values in other words were not written by us; not one flip is read as something else, or as the same."""
    file = write(store, 7).path / MANIFEST
    text, whole = file.read_text(), file.read_bytes()
    others = [text.replace("\n", "\n "), text + "\n", text.replace('"step": 7', '"step": 7, "step": 7')]
    contents = [other.encode() for other in others]
    contents += [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    for content in contents:
        file.write_bytes(content)
        assert Entry.of(file.parent).manifest is None
    file.write_text(text)
    assert Entry.of(file.parent).manifest is not None


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


def test_what_cannot_be_removed_stays(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """It is no error: the disk is tidied up another time."""
    for step in (1, 2, 3):
        write(store, step)

    def busy(disk: Any, path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patched:
        patched.setattr(files.Disk, "unlink", busy)
        store.prune(1, 0)
        assert steps(store) == [3]
    store.sweep()
    assert [path.name for path in store.path.iterdir()] == ["step-00000003"]


# In the background.


def test_the_writer_keeps_away_from_a_disk_that_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of each is heard once, in order; it says why in a word, and leaves no thread."""
    now, before = [100.0], threading.active_count()
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def fail() -> Entry:
        raise OSError(28, "No space left on device")

    one = writer.Writer()
    one.offer(writer.Job(1, partial(write, store, 1)))
    assert one.wait(200)
    assert one.is_free
    one.offer(writer.Job(2, fail))
    assert one.wait(200)
    assert not one.is_free
    now[0] += writer._PAUSE_S
    assert one.is_free
    assert one.write_now(writer.Job(3, partial(write, store, 3))).entry is not None
    assert [(job.step, job.error and job.trouble) for job in one.finished] == [
        (1, None),
        (2, "No space left on device"),
        (3, None),
    ]
    for thread in [thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"]:
        thread.join(200)
    assert threading.active_count() == before


# The format.


def test_safetensors_are_written_as_the_library_reads_them() -> None:
    """Every dtype, empty and scalar tensors, views and strides; the data begins where it is aligned."""
    tensors = {str(dtype): torch.ones(3).to(dtype) for dtype in NAMES}
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "ü": torch.ones(1)}
    tensors |= {"turned": torch.arange(6.0).reshape(2, 3).t(), "part": torch.arange(9)[::2]}
    content = b"".join(bytes(chunk) for chunk in chunks(tensors))
    assert (8 + int.from_bytes(content[:8], "little")) % 8 == 0
    read = load(content)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype is tensor.dtype
        assert torch.equal(read[name].to(torch.float64), tensor.to(torch.float64))


# Whether it fits.


class _Position:
    def state_dict(self) -> dict[str, int]:
        return {"position": 3}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Rprop"])
def test_the_state_of_the_run_itself_always_fits(kind: str) -> None:
    """Before the first update a run has no moments yet, and those of a checkpoint fit all the same."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer, RunState]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        return model, optimizer, RunState(model, [optimizer], [], _Position(), Clock(), device=CPU)

    model, optimizer, old = made()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    _, _, fresh = made()
    assert explain_mismatch(fresh.live(), old.live()) == ""
    assert explain_mismatch(old.live(), fresh.live()) == ""
