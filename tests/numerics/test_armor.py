"""Armor around one operation of the user's: what it mends, what it leaves alone, and where it holds."""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from resilient_train.extensions.armor import armor as patches
from resilient_train.extensions.armor.ast_patch import CannotArmor

Write = Callable[[str], ModuleType]
HEAD = """from __future__ import annotations
import math
import torch
import torch.nn.functional as F
from torch import nn
"""
# Its compiler makes an instance of what it says nobody should make one of, wherever an autograd.Function is called.
TORCHS_OWN_WARNING = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
_numbers = itertools.count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module as a user would, and import it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(source: str) -> ModuleType:
        name = f"users_program_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(HEAD + textwrap.dedent(source))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return written


@pytest.fixture(autouse=True)
def only_new_objects() -> Iterator[None]:
    """A suite has a million objects: what was there before a test is not searched for functions to patch."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def armor() -> Iterator[ModuleType]:
    yield patches
    patches.remove()


def lines(module: ModuleType, mark: str = "# guilty") -> list[int]:
    text = Path(str(module.__file__)).read_text()
    return [number for number, line in enumerate(text.splitlines(), start=1) if line.endswith(mark)]


def put_on(armor: ModuleType, module: ModuleType, *ops: str) -> None:
    for line, op in zip(lines(module), ops, strict=True):
        armor.add(str(module.__file__), line, op)


def slopes(function: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """What a function returns, and the slopes of its sum with weights that differ."""
    given = [value.clone().requires_grad_(value.is_floating_point()) for value in inputs]
    out = function(*given)
    if out.requires_grad:
        (out * torch.arange(1, out.numel() + 1).view(out.shape).to(out.dtype)).sum().backward()
    return [out.detach(), *(value.grad for value in given if value.grad is not None)]


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def finite(values: list[Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in values)


# ------------------------------------------------------------------------------------------------------ what it mends

SOUND = {  # expression: what torch calls it
    "torch.log(x)": "log",
    "x / y": "div",
    "1 / x": "reciprocal",
    "2 ** x": "pow",
    "x @ x.T": "mm",
    "x * x * x + x": "mul",
    "x * x * x + x / x": "",
    "F.normalize(x, dim=0)": "normalize",
    "x.std(dim=-1)": "std",
    "torch.linalg.inv(x.float() + torch.eye(4)).to(x.dtype)": "linalg_inv",
    "x.digamma()": "digamma",
    "F.mse_loss(x, y, reduction='none')": "mse_loss",
    "nn.LayerNorm(4, dtype=x.dtype)(x)": "native_layer_norm",
    "nn.Sequential(nn.Softplus(), nn.ReLU(inplace=True), nn.LogSoftmax(-1))(x)": "_log_softmax",
    "functools.partial(F.log_softmax, dim=-1)(x)": "log_softmax",
    "torch.float_power(x, 3)": "pow",  # in doubles
    "torch._foreach_sqrt([x, x])[1]": "sqrt",  # of lists
}


def write_sound(write: Write) -> ModuleType:
    body = "\n".join(f"def of_{number}(x, y):\n    return {text}  # guilty" for number, text in enumerate(SOUND))
    return write(f"import functools\n{body}\n")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_does_not_break_keeps_every_bit(write: Write, armor: ModuleType, dtype: torch.dtype) -> None:
    """Values and slopes of sound operations are the bare ones, whatever form the armor takes."""
    module = write_sound(write)
    torch.manual_seed(0)
    x, y = torch.rand(4, 4, dtype=dtype) + 0.1, torch.rand(4, 4, dtype=dtype) + 0.1
    bare = [slopes(getattr(module, f"of_{number}"), x, y) for number in range(len(SOUND))]
    put_on(armor, module, *SOUND.values())
    for number, text in enumerate(SOUND):
        assert same_bits(slopes(getattr(module, f"of_{number}"), x, y), bare[number]), text


INF = math.inf
BROKEN = [  # operation, expression, x, what comes out, and the slope of 1 * out[0] + 2 * out[1] + ...
    ("digamma", "x.digamma()", [1.0, 0.0], [-0.5772157, -0.5772157], [math.pi**2 / 6, 0.0]),  # as large as the largest
    ("erfinv", "erfinv(x)", [0.5, 2.0], [0.4769363, 0.0], [1.1125849, 0.0]),  # NaN
    ("mul", "x * 1e30 * 1e30", [2.0, -2.0], [0.0, 0.0], [0.0, 0.0]),  # nothing to compare with
    ("mul", "x * 1e30 * 1e30", [-2.0], [-(2.0**48)], [0.0]),  # a single number, such as a loss
    ("var", "x.view(2, 1).var(dim=1)", [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]),
    ("sub", "x - torch.tensor([math.inf, math.inf])", [1.0, INF], [-INF, 0.0], [1.0, 0.0]),  # inf - 1 is no fault
    ("amax", "x.amax(0, keepdim=True)", [-INF, -INF], [-INF], [0.5, 0.5]),
    ("celu", "F.mse_loss(x, x + math.nan, reduction='none')", [1.0, 2.0], None, None),  # a NaN from elsewhere stays
]


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize(("op", "text", "x", "value", "slope"), BROKEN, ids=[row[1] for row in BROKEN])
def test_only_what_the_operation_broke_is_mended(
    write: Write,
    armor: ModuleType,
    op: str,
    text: str,
    x: list[float],
    value: list[float] | None,
    slope: list[float] | None,
) -> None:
    """NaN becomes 0, an infinity as large as its neighbours, without a slope; infinities from before stay."""
    module = write(f"from torch import erfinv\ndef compute(x):\n    return {text}  # guilty\n")
    put_on(armor, module, op)
    out, *rest = slopes(module.compute, torch.tensor(x))
    if value is None:
        assert out.isnan().all()
    else:
        torch.testing.assert_close([out, *rest], [torch.tensor(value), torch.tensor(slope)])


WIDER = {  # what overflows on the way to a value that does not, and the same by another formula
    "torch.log(torch.exp(x).sum(-1))": ("exp", lambda x: x.logsumexp(-1)),
    "torch.log(torch.exp(x).unsqueeze(-2).transpose(-1, -2).sum(-2))": ("exp", lambda x: x.logsumexp(-1, keepdim=True)),
    "torch.square(1e20 * x).sum(-1).sqrt()": ("square", lambda x: 1e20 * x.norm(dim=-1)),
    "torch.linalg.det(torch.diag_embed(1 + x.abs())).log()": ("linalg_det", lambda x: (1 + x.abs()).log().sum(-1)),
    "x.softmax(-1).log()": ("log", lambda x: x.log_softmax(-1)),
    "torch.log(torch.sigmoid(-x))": ("log", lambda x: F.logsigmoid(-x)),
    "torch.erfc(x / 10).log()": ("log", lambda x: torch.erfc(x.double() / 10).log().to(x.dtype)),
}


@pytest.mark.parametrize("text", WIDER)
def test_what_leaves_the_type_on_the_way_and_comes_back_is_what_it_is(
    write: Write, armor: ModuleType, text: str
) -> None:
    """The expression is computed in a wider type, slopes too; where nothing breaks it keeps every bit."""
    op, formula = WIDER[text]
    module = write(f"def f(x):\n    return {text}  # guilty")
    fine, broken = torch.tensor([[0.5, -1.0, 0.25]]) * 1e-3, torch.tensor([[0.5, 200.0, -3.0], [199.0, 200.0, 150.0]])
    bare = slopes(module.f, fine)
    put_on(armor, module, op)
    assert same_bits(slopes(module.f, fine), bare)
    for mine, theirs in zip(slopes(module.f, broken), slopes(formula, broken), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert finite(slopes(module.f, torch.tensor([[1e4, -3.0, 0.0]]))), "beyond the wider type, too"


def test_only_what_can_be_computed_again_is(write: Write, armor: ModuleType) -> None:
    """A module of the user's may count its calls, and what draws numbers draws others."""
    module = write("""
        class Net(nn.Module):
            calls = 0
            def forward(self, x):
                return torch.log(torch.exp(self.scores(x)).sum())  # guilty
            def scores(self, x):
                self.calls += 1
                return x
        def drawn(x):
            return torch.log(torch.exp(torch.dropout(x, 0.5, True)).sum())  # guilty
    """)

    def drawn() -> list[Tensor]:
        torch.manual_seed(0)
        return [module.drawn(x), torch.rand(1)]

    net, x = module.Net(), torch.tensor([1.0, 2.0])
    bare = drawn()
    put_on(armor, module, "exp", "exp")
    assert same_bits(drawn(), bare)
    assert finite([net(x), net(x.pow(8))])
    assert net.calls == 2


def test_slopes_are_given_as_they_came(write: Write, armor: ModuleType) -> None:
    """One that arrives broken stays; where none arrives none does, as zeros would let weights decay."""
    module = write("def compute(x, y):\n    return [torch.lgamma(one) for one in (x, y)][0] * 3  # guilty\n")
    put_on(armor, module, "lgamma")
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    module.compute(x, y).backward(torch.tensor([1.0, INF, math.nan]))
    assert x.grad is not None
    assert x.grad.isfinite().tolist() == [True, False, False]
    assert y.grad is None


def test_only_that_operation_at_that_line_is_armored(write: Write, armor: ModuleType) -> None:
    """The same text a line further on, and another operation in the same line, stay as they are."""
    module = write("""
        def compute(x):
            first = x.digamma() + x.erfinv()  # guilty
            return first, x.digamma()
    """)
    put_on(armor, module, "digamma")
    first, second = module.compute(torch.tensor([0.0, 1.0]))
    assert first.tolist() == [pytest.approx(-0.5772157), INF]
    assert second.isinf().tolist() == [True, False]


def test_what_is_no_tensor_of_floating_numbers_passes(write: Write, armor: ModuleType) -> None:
    """What else is computed at the line is the same as ever."""
    module = write("""
        def compute(x, y):
            return x / y  # guilty
        def joined(x, y):
            return x + y  # guilty
    """)
    put_on(armor, module, "div", "add")
    assert module.compute(1, 2) == 0.5
    with pytest.raises(ZeroDivisionError):
        module.compute(1, 0)
    assert module.joined("a", "b") == "ab"
    assert module.joined(torch.tensor([True]), torch.tensor([2])).tolist() == [3]
    assert module.joined(torch.tensor([1j]), 1).tolist() == [1 + 1j]


# ------------------------------------------------------------------------------------------------- where a line may be

PLACES = {
    "function": "def compute(x):\n    return x.digamma()  # guilty",
    "method": "class A:\n    def f(self, x):\n        return x.digamma()  # guilty\ncompute = A().f",
    "super": "class B(nn.Identity):\n    pass\nclass A(B):\n    def forward(self, x):\n"
    "        return super().forward(x.digamma())  # guilty\ncompute = A()",
    "decorated": "@torch.no_grad()\n@functools.lru_cache\ndef compute(x):\n    return x.digamma()  # guilty",
    "closure": "def make(scale):\n    def f(x):\n        return x.digamma() * scale  # guilty\n    return f\n"
    "compute = make(1)",
    "generator": "def f(x):\n    yield x.digamma()  # guilty\ndef compute(x):\n    return next(f(x))",
    "several lines": "def compute(x):\n    return (\n        x.abs()\n        .digamma()  # guilty\n"
    "        .clone()\n    )",
    "the rest of a call": "def compute(x):\n    return torch.digamma(\n        x  # guilty\n    )",
    "a name of its own": "act = torch.digamma\ndef compute(x):\n    return act(x)  # guilty",
    "in an f-string": "def compute(x):\n    f'{x}'; return x.digamma()  # guilty",
}


@pytest.mark.parametrize("place", PLACES)
def test_any_kind_of_function_can_be_armored(write: Write, armor: ModuleType, place: str) -> None:
    """Once it was called, so that Python has specialised its code, and through a name that was imported before."""
    module = write(f"import functools\n{PLACES[place]}\n")
    compute = module.compute
    for _ in range(100):
        assert not compute(torch.zeros(2)).isfinite().any()
    put_on(armor, module, "digamma")
    assert compute(torch.zeros(3)).isfinite().all()
    armor.remove()
    assert not compute(torch.zeros(4)).isfinite().any()


# --------------------------------------------------------------------------------------------------- under what it runs

NETWORK = """
    class Ratio(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.first(x).tanh()
            h = torch.digamma(h - x) / (h + 1)  # guilty
            return self.last(h)
"""


def broken_network(write: Write, armor: ModuleType, op: str = "digamma") -> tuple[nn.Module, Tensor]:
    module = write(NETWORK)
    put_on(armor, module, op)
    torch.manual_seed(0)
    network = module.Ratio()
    with torch.no_grad():
        network.first.weight[0], network.first.bias[0] = 0.0, 0.5
        x = torch.rand(3, 4) + 2
        x[0, 0] = network.first(x)[0, 0].tanh()
    return network, x


def gradients(network: nn.Module, loss: Tensor) -> list[Tensor]:
    network.zero_grad()
    torch.autograd.backward(loss)
    found = [weight.grad for weight in network.parameters() if weight.grad is not None]
    assert len(found) == len(list(network.parameters()))
    return [loss.detach(), *(gradient.clone() for gradient in found)]


def test_it_computes_the_same_under_all_that_runs_it(write: Write, armor: ModuleType, tmp_path: Path) -> None:
    """Both kinds of activation checkpoints, which mend a second time; DDP; an evaluation."""
    network, x = broken_network(write, armor)
    straight = gradients(network, network(x).sum())
    assert finite(straight)
    assert all(gradient.any() for gradient in straight)
    for reentrant in (True, False):
        inputs = x.clone().requires_grad_() if reentrant else x
        assert same_bits(straight, gradients(network, checkpoint(network, inputs, use_reentrant=reentrant).sum()))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert same_bits(straight, gradients(network, nn.parallel.DistributedDataParallel(network)(x).sum()))
    finally:
        torch.distributed.destroy_process_group()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(network.eval()(x).sum(), straight[0])


@pytest.mark.parametrize("op", ["digamma", "div", "add", ""])
def test_it_holds_under_autocast_and_in_half_precision(write: Write, armor: ModuleType, op: str) -> None:
    network, x = broken_network(write, armor, op)
    with torch.autocast("cpu", torch.bfloat16):
        armored = network(x)
        armor.remove()
        assert armored.dtype == network(x).dtype
    module = write("def compute(x, y):\n    return (x @ y).digamma()  # guilty\n")
    put_on(armor, module, "")
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        out = module.compute(*[torch.full((2, 2), 200.0, dtype=dtype)] * 2)
        assert out.dtype == dtype
        assert out.isfinite().all()


@TORCHS_OWN_WARNING
def test_a_compiled_model_is_compiled_anew(write: Write, armor: ModuleType) -> None:
    """Armor that is put on after a whole-graph compilation holds, changes no bit that was sound, and comes off."""
    module = write(NETWORK)
    torch.manual_seed(0)
    network = module.Ratio()
    x = torch.rand(3, 4) + 2
    compiled: Any = torch.compile(network, backend="eager", fullgraph=True)
    bare = gradients(network, compiled(x).sum())
    assert finite(bare)
    put_on(armor, module, "digamma")
    assert same_bits(gradients(network, compiled(x).sum()), bare)
    with torch.no_grad():
        network.first.weight[0], network.first.bias[0] = 0.0, 0.5
        x[0, 0] = network.first(x)[0, 0].tanh()
    assert finite(gradients(network, compiled(x).sum()))
    armor.remove()
    assert not finite(gradients(network, compiled(x).sum()))


def test_no_form_waits_for_the_device(write: Write, armor: ModuleType) -> None:
    """Whatever reads a number raises where tensors are only shapes, and would break the graph of a compiler."""
    module = write_sound(write)
    put_on(armor, module, *SOUND.values())
    with FakeTensorMode():
        for number in range(len(SOUND)):
            slopes(getattr(module, f"of_{number}"), torch.rand(4, 4), torch.rand(4, 4))


# ------------------------------------------------------------------------------------------------ on, off, and on again


def test_armor_adds_up_and_comes_off(write: Write, armor: ModuleType) -> None:
    """Twice the same is once; the code is what it was when all patches are removed."""
    module = write("def compute(x):\n    return x.digamma(), x.erfinv()  # guilty\n")
    code = module.compute.__code__
    for op in ("digamma", "digamma", "erfinv"):
        put_on(armor, module, op)
    assert [patched.op for patched in armor.PATCHED] == ["digamma", "erfinv"]
    assert [bool(out.isfinite().all()) for out in module.compute(torch.tensor([1.0, 0.0]))] == [True, True]
    armor.remove()
    assert armor.PATCHED == []
    assert module.compute.__code__ == code


# ----------------------------------------------------------------------------------------------- what cannot be armored


def test_it_says_plainly_what_cannot_be_armored(write: Write, armor: ModuleType) -> None:
    """One line, and nothing has changed."""
    module = write("""
        def compute(x):
            y = x
            return [x.digamma(),  # guilty
                    y]
        def in_place(x):
            x /= x.clone().digamma_()
        z = torch.zeros(2).digamma()
    """)
    (line,) = lines(module)
    file = str(module.__file__)
    for place, why in (
        (line - 1, f"nothing is computed in line {line - 1}"),
        (line + 3, "or only in place"),
        (line + 4, f"line {line + 4} of .* is in no function"),
    ):
        with pytest.raises(CannotArmor, match=why):
            armor.add(file, place, "digamma")
        with pytest.raises(CannotArmor, match=why):
            armor.check(file, place, "digamma")
    armor.check(file, line, "digamma")
    assert armor.PATCHED == []
    assert not module.compute(torch.zeros(2))[0].isfinite().any()


@pytest.mark.parametrize("edit", ["# a line more\n{}", "{} + 1", "{}\n    ("])
def test_a_file_that_was_edited_is_not_what_runs(write: Write, armor: ModuleType, edit: str) -> None:
    """Neither shifted, nor changed, nor unfinished; with its text as it was it can be armored."""
    module = write("def compute(x):\n    return x.digamma()")
    path = Path(str(module.__file__))
    before = path.read_text()
    line = len(before.splitlines())
    path.write_text(edit.format(before))
    with pytest.raises(CannotArmor, match=f"{path} is not what runs: it was edited|nothing is computed"):
        armor.add(str(path), line, "digamma")
    path.write_text(before)
    armor.add(str(path), line, "digamma")
    assert module.compute(torch.zeros(2)).isfinite().all()


def test_a_function_that_nothing_creates_any_more_is_refused(write: Write, armor: ModuleType) -> None:
    module = write("""
        def maker():
            return lambda x: x.digamma()  # guilty
        kept = maker()
        last = lambda x: x.digamma()  # guilty
        del last
    """)
    made, last = lines(module)
    armor.add(str(module.__file__), made, "digamma")
    assert module.kept(torch.zeros(2)).isfinite().all()
    with pytest.raises(CannotArmor, match="nothing that creates <lambda> is alive"):
        armor.add(str(module.__file__), last, "digamma")


def test_a_function_that_is_called_like_an_operation_is_not_taken_for_it(write: Write, armor: ModuleType) -> None:
    """Nor is Python's own, nor a module of the user's."""
    module = write("""
        def normalize(x):
            return x * 3
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = Norm()
            def forward(self, x):
                return normalize(x), self.norm(x), math.log(x[0])  # guilty
        class Norm(nn.Module):
            def forward(self, x):
                return x + 1
    """)
    network, x = module.Net(), torch.tensor([2.0, INF])
    bare = network(x)
    for op in ("normalize", "norm", "log", ""):
        put_on(armor, module, op)
    for one, other in zip(network(x), bare, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
