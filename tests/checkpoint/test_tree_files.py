"""Trees on disk: what is read back is what was written, and what is damaged is refused in one line."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from test_state import Bench
from torch import nn

from resilient_train.core.tree import put_together, taken_apart
from resilient_train.data.trees import sha256, state_sha256
from resilient_train.durable.tree_files import TENSORS, TREE, SerializedTree, load_tree


def there_and_back(directory: Path, tree: Any) -> Any:
    directory.mkdir(exist_ok=True)
    SerializedTree(tree).write(directory)
    return load_tree(directory)


def assert_same(one: Any, other: Any) -> None:
    """Equal in structure, type, order, dtype, shape and to the last bit."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert [*map(repr, one)] == [*map(repr, other)]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert sha256(one) == sha256(other.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg())
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert repr(one) == repr(other)  # tells -0.0 from 0.0, and takes nan for nan


def test_a_run_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    """The state of a run, generators and moments included, has the same digest on disk, and restores to it."""
    bench, other = Bench(), Bench()
    for _ in range(7):
        bench.train()
    random.random()
    np.random.random(3)
    bench.state.keep("average", nn.Linear(2, 2))
    other.state.keep("average", nn.Linear(2, 2))
    plain, tensors = taken_apart(bench.state.live())
    saved, digest = put_together(plain, [one.detach() for one in tensors]), state_sha256(bench.state)
    loaded = there_and_back(tmp_path / "tree", saved)
    assert_same(loaded, saved)
    other.train()
    assert state_sha256(other.state) != digest
    other.state.restore(loaded)
    assert state_sha256(other.state) == digest


def test_moments_keep_the_order_of_their_axes(tmp_path: Path) -> None:
    """A channels_last tensor comes back as one: another order in memory may change the last bit of a sum."""
    given = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(4, 6).t()]
    for loaded, tensor in zip(there_and_back(tmp_path / "tree", given), given, strict=True):
        assert loaded.stride() == tensor.stride()
        assert torch.equal(loaded, tensor)


base = torch.arange(24.0)
ODD: dict[str, Any] = {
    "nothing": {},
    "root tensor": torch.ones(2),
    "plain": [
        *(None, True, False, 0, 1, 1.0, -0.0, 2**200, -(2**63), 0.1, 5e-324, 1.7e308),
        *("", "é\ud800\0\n"),
    ],
    "not finite": (math.nan, math.inf, -math.inf),
    "empty": [[], (), {}, torch.empty(0, 3), np.empty((0, 2**40))],
    "keys": {0: "int", "0": "str", -1: {1: torch.zeros(1)}, "a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "": 1},
    "look alikes": {1: torch.ones(1), "1": torch.zeros(1), "__metadata__": torch.ones(1), "\ud800": torch.ones(3)},
    "__metadata__": torch.ones(1),
    "tuples": ((1, (2.5, [(), None])), [(1,)]),
    "zero-dim": [torch.tensor(3.5), torch.tensor(True), np.array(2.5), np.float32(0.1), np.int64(-1), np.bool_(True)],
    "nan inside": [torch.tensor([math.nan, -0.0, math.inf]), np.array([math.nan, -0.0])],
    "shared": [base, base[3:], base.view(4, 6), base.view(4, 6).t(), base[::2], base],
    "expanded": torch.ones(1, 3).expand(5, 3),
    "conjugate": [torch.tensor([1 + 2j, 3j]).conj(), torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag],
    "parameter": [nn.Parameter(torch.ones(2)).data, nn.Linear(2, 2).weight.detach()],
    "dtypes": [
        torch.zeros(3).to(dtype)
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool, torch.complex64),
            *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        )
    ],
    "unaligned": {"one": torch.ones(1, dtype=torch.int8), "two": torch.tensor([1 + 2j, 3]), "three": np.arange(3.0)},
    "arrays": [
        *(np.arange(6).reshape(2, 3).T, np.arange(6)[::2], np.array([True, False])),
        np.asfortranarray(np.eye(3)),
    ],
    "generators": [
        random.Random(3).getstate(),
        np.random.RandomState(3).get_state(legacy=False),
        np.random.RandomState(3).get_state(),
        np.random.default_rng(3).bit_generator.state,
        np.random.Generator(np.random.MT19937(3)).bit_generator.state,
        np.random.Generator(np.random.Philox(3)).bit_generator.state,
        torch.Generator().manual_seed(3).get_state(),
    ],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_trees_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    """Every kind of leaf, key and shape comes back with its type, its dtype and its bits."""
    tree = {name: ODD[name]} if name == "__metadata__" else ODD[name]
    assert_same(there_and_back(tmp_path / "tree", tree), tree)


class Pair(NamedTuple):
    one: int


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": [1, object()]}, "['a'][1] is a builtins.object"),
        (set(), "the tree itself is a builtins.set"),
        ({"a": {1.5: 1}}, "['a'] has the key 1.5"),
        ([Pair(1)], "Pair"),
        ([torch.eye(2).to_sparse()], "[0] is a torch.sparse_coo tensor"),
        ([torch.empty(2, device="meta")], "meta"),
        *(([np.array([one])], "[0] is a numpy array of ") for one in (object(), "text")),
        ([1j], "[0] is a builtins.complex"),
        ([torch.ones(1, dtype=torch.complex128)], "[0] is a torch.strided tensor of torch.complex128"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_named_by_its_place(tmp_path: Path, tree: Any, place: str) -> None:
    """An object of any other type is refused before anything is written."""
    with pytest.raises(TypeError) as refused:
        SerializedTree(tree).write(tmp_path)
    assert place in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


GOOD = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": np.arange(3),
    "c": torch.ones(2, dtype=torch.complex64),
    "d": [1.5, (2,)],
}


def test_cuts_and_flips_never_end_in_anything_but_a_value_error(tmp_path: Path) -> None:
    """Either file cut or changed at every third byte is refused, or read as another tree; a manifest tells those."""
    SerializedTree(GOOD).write(tmp_path)
    for name in (TENSORS, TREE):
        whole = (tmp_path / name).read_bytes()
        cuts = [whole[:length] for length in range(0, len(whole), 3)]
        flips = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(0, len(whole), 3)]
        for content in (*cuts, *flips):
            (tmp_path / name).write_bytes(content)
            with suppress(ValueError):
                load_tree(tmp_path)
        (tmp_path / name).write_bytes(whole)
    assert_same(load_tree(tmp_path), GOOD)
