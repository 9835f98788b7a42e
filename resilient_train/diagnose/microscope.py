"""Watches every operation of a forward and a backward for the one that first makes a value that is not finite.

Torch's functions are seen as a person calls them, one call each, with the line they stand in. What the backward of a
call does is seen at the nodes that the call has put into the graph. NaN and infinity are kept apart: an infinite value
on purpose, such as a mask's, is nobody's fault until it becomes a NaN.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from resilient_train.diagnose.advice import is_plain
from resilient_train.diagnose.frames import Line, is_users, user_line

_MADE = ("full", "full_like", "new_full", "tensor", "as_tensor", "masked_fill", "fill", "fill_diagonal", "zeros_like")
_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "resize", "resize_as", "set")


@dataclass(frozen=True, slots=True)
class Birth:
    """Where a value that is not finite came from values that are."""

    phase: str  # forward, backward
    op: str
    kind: str  # nan, inf
    call: int  # the number of the call in its forward
    line: Line | None
    inputs: tuple[Mapping[str, Any], ...] = ()
    node: str = ""  # what the backward of it is made of
    is_total: bool = False  # its result is a single number
    after: Birth | None = None  # the first of what armor has mended on the way to it: this one is a consequence


@dataclass(slots=True)
class _Call:
    number: int
    op: str
    line: Line | None
    origin: Birth | None = None  # of what it was given that is not finite


@dataclass(slots=True)
class _Trace:
    """What is known of a tensor that is not finite: whose fault it is. None: somebody's purpose."""

    tensor: Tensor  # held: its id must not go to another
    birth: Birth | None


@dataclass
class Seen:
    """What the microscope saw."""

    of_loss: Birth | None = None  # of the value that made the loss what it is
    backward: Birth | None = None  # the first one
    inputs: tuple[Mapping[str, Any], ...] = ()  # of the call that was asked for
    calls: int = 0


class Microscope(TorchFunctionMode):
    """Enter it around forward and backward; `seen` tells what there was.

    To hold on to the inputs of every call would take the memory of all activations twice. So the inputs of a call
    whose backward is to blame are looked at in a second replay: `look_at` is its number.
    """

    def __init__(
        self, model: nn.Module, *, look_at: int | None = None, armored: Collection[tuple[str, int, str]] = ()
    ) -> None:
        """`armored` are operations by file, line and name: what they break is mended behind them."""
        super().__init__()
        self._armored = armored
        self.seen = Seen()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._look_at = look_at
        self._traces: dict[int, _Trace] = {}
        self._nodes: dict[Any, _Call] = {}
        self._hooks: list[Any] = []
        self._mended: dict[tuple[str, int], Birth] = {}  # by line: what broke in armor, and goes on as made-up values
        self._unmade: dict[Any, Birth] = {}  # by node: what that was computed from
        self._losses: list[Any] = []  # their nodes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "backward"):
            return func(*args, **kwargs)  # what a reentrant checkpoint computes once more in there is out of sight
        inputs = _floating((args, {key: value for key, value in kwargs.items() if key != "out"}))
        in_place = _is_in_place(name)
        was = [_kinds(one) for one in inputs] if in_place else []
        call = _Call(self.seen.calls, op_name(name), user_line(self._names))
        self.seen.calls += 1
        if call.number == self._look_at:
            self.seen.inputs = statistics(inputs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            outputs = _floating(args[:1] if in_place and result is None else result)
            for output in outputs:
                kinds = _kinds(output)
                if kinds:
                    birth = self._judged(call, kinds, args, kwargs, inputs, was, output.numel() == 1)
                    self._traces[id(output)] = _Trace(output, birth)
                    if birth is not None and birth.call == call.number and self._is_armored(call):
                        self._remember(birth, inputs)
                elif in_place:
                    self._traces.pop(id(output), None)
            if not in_place:
                call.origin = self._first(inputs)
            self._watch(call, inputs, outputs)
        return result

    def judge(self, loss: Tensor) -> None:
        """Say whose fault it is that a loss is not finite."""
        self._losses.append(loss.grad_fn)
        trace = self._traces.get(id(loss))
        self.seen.of_loss = trace.birth if trace else None

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()
        self._traces.clear()
        self._unmade.clear()
        self._losses.clear()

    # Forward.

    def _judged(
        self,
        call: _Call,
        kinds: frozenset[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Sequence[Tensor],
        was: Sequence[frozenset[str]],
        is_total: bool,
    ) -> Birth | None:
        """Whose fault a result is: an input's, nobody's, or that of this call."""
        before = was or [_kinds(one) for one in inputs]
        rotten = [one for one, its in zip(inputs, before, strict=True) if its]
        if inherited := self._first(rotten):
            return inherited
        had = frozenset().union(*before)
        if "nan" in had or ("nan" not in kinds and "inf" in had):
            return None  # it came in with the batch, or on purpose
        if call.op in _UNFILLED or (call.op in _MADE and _has_infinite_number((args, kwargs))):
            return None
        if "nan" not in kinds and _has_infinite_number((args, kwargs)):
            return None
        kind = "nan" if "nan" in kinds else "inf"
        told = () if was else statistics(inputs)
        after = self._after([one.grad_fn for one in inputs], call.op)
        return Birth("forward", call.op, kind, call.number, call.line, told, is_total=is_total, after=after)

    def _first(self, inputs: Iterable[Tensor]) -> Birth | None:
        """The earliest birth that inputs come of."""
        births = [self._traces[id(one)].birth for one in inputs if id(one) in self._traces]
        return min(filter(None, births), key=lambda birth: birth.call, default=None)

    # What comes of armor.

    def _is_armored(self, call: _Call) -> bool:
        return call.line is not None and (call.line.file, call.line.line, call.op) in self._armored

    def _remember(self, birth: Birth, inputs: Iterable[Tensor]) -> None:
        """Note what armor is about to mend: whatever is computed of that line's values, or of what it was given."""
        assert birth.line is not None
        self._mended.setdefault((birth.line.file, birth.line.line), birth)
        for one in inputs:
            node = one.grad_fn
            for given in (node, *(before for before, _ in getattr(node, "next_functions", ()) if _is_foreign(node))):
                if given is not None:
                    self._unmade.setdefault(given, birth)

    def _after(self, nodes: Iterable[Any], op: str) -> Birth | None:
        """The first of what broke in armor that these nodes come of; the same operation, of the same values too."""
        if not self._mended:
            return None
        met, waiting, found = set(), list(nodes), []
        while waiting:
            node = waiting.pop()
            if node is None or node in met:
                continue
            met.add(node)
            waiting += [before for before, _ in node.next_functions]
            call, given = self._nodes.get(node), self._unmade.get(node)
            if call is not None and call.line is not None:
                found.append(self._mended.get((call.line.file, call.line.line)))
            if given is not None and given.op == op:
                found.append(given)
        return min((one.after or one for one in found if one), key=lambda one: one.call, default=None)

    # Backward.

    def _watch(self, call: _Call, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Listen at every node that this call has put into the graph."""
        for one in inputs:
            if one.grad_fn is not None and one.grad_fn not in self._nodes:
                self._listen(one.grad_fn, _foreign(one.grad_fn, call))  # not made by a function of torch's
        for output in outputs:
            waiting = [output.grad_fn]
            while waiting:
                node = waiting.pop()
                if node is None or node in self._nodes or node.name().endswith("AccumulateGrad"):
                    continue
                self._listen(node, call if not _is_foreign(node) else _foreign(node, call))
                waiting += [before for before, _ in node.next_functions]

    def _listen(self, node: Any, call: _Call) -> None:
        self._nodes[node] = call
        is_armored = self._is_armored(call)

        def passed(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
            if self.seen.backward is not None or is_armored:
                return
            with torch._C.DisableTorchFunction():
                after = frozenset().union(*(_kinds(one) for one in grad_inputs if one is not None))
                if after and not any(_kinds(one) for one in grad_outputs if one is not None):
                    if call.origin is not None:  # its slope is not finite for what came into it
                        self.seen.backward = call.origin
                        return
                    kind = "nan" if "nan" in after else "inf"
                    name = node.name().removesuffix("Backward0").removesuffix("Backward")
                    # A slope that is merely too large comes of all that the loss is made of.
                    first = self._after([node, *self._losses] if is_plain(call.op) else [node], call.op)
                    self.seen.backward = Birth("backward", call.op, kind, call.number, call.line, (), name, after=first)

        self._hooks.append(node.register_hook(passed))


def _is_foreign(node: Any) -> bool:
    return hasattr(node, "_forward_cls")


def _foreign(node: Any, call: _Call) -> _Call:
    """The line of an operation that a user has written backward and all."""
    kind = getattr(node, "_forward_cls", None)
    if kind is None:
        return _Call(-1, node.name().removesuffix("0").removesuffix("Backward"), None)
    try:
        lines, first = inspect.getsourcelines(kind.backward)
        at = next(first + place for place, text in enumerate(lines) if text.lstrip().startswith("def "))
        line = Line(inspect.getsourcefile(kind) or "", at)
    except (OSError, TypeError, StopIteration):
        return _Call(call.number, kind.__name__, None)
    return _Call(call.number, kind.__name__, line if is_users(line.file) else None)


_OPERATORS = {"truediv": "div", "matmul": "matmul", "floordiv": "floor_divide", "getitem": "getitem"}


def op_name(name: str) -> str:
    """What a person calls a function of torch's: `__rtruediv__` is div, `sqrt_` is sqrt."""
    if name.startswith("__") and name.endswith("__"):
        bare = name.strip("_")
        for prefix in ("", "r", "i"):
            if bare.startswith(prefix) and (plain := bare[len(prefix) :]) in (*_OPERATORS, *_ARITHMETIC):
                return _OPERATORS.get(plain, plain)
        return bare
    name = name.lstrip("_").rstrip("_") or name
    return _ALIASES.get(name, name)


_ARITHMETIC = ("add", "sub", "mul", "pow", "mod", "neg", "abs")
_ALIASES = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "rsub": "sub",
    "arctan2": "atan2",
    "arccos": "acos",
    "arcsin": "asin",
    "arctanh": "atanh",
    "arccosh": "acosh",
    "float_power": "pow",
    "special_log_softmax": "log_softmax",
    "special_softmax": "softmax",
}


def _is_in_place(name: str) -> bool:
    return (
        (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name.strip("_")[1:] in (*_OPERATORS, *_ARITHMETIC))
        or name == "__setitem__"
    )


def _floating(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if _is_floating(one)]


def _is_floating(one: Any) -> bool:
    return isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex()) and one.layout is torch.strided


def _has_infinite_number(tree: Any) -> bool:
    return any(isinstance(one, float) and not math.isfinite(one) for one in tree_leaves(tree))


_FINITE: frozenset[str] = frozenset()


def _kinds(tensor: Tensor) -> frozenset[str]:
    """What a tensor holds that is not finite: nan, inf."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if not _is_floating(tensor) or tensor.is_meta or bool(tensor.isfinite().all()):
            return _FINITE
        has_nan = bool(tensor.isnan().any())
        return frozenset(["nan"] if has_nan else []) | frozenset(["inf"] if bool(tensor.isinf().any()) else [])


def statistics(tensors: Iterable[Tensor]) -> tuple[Mapping[str, Any], ...]:
    """What the inputs of an operation were, as far as a person wants to know."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return tuple(_statistics(one.detach()) for one in list(tensors)[:4])


def _statistics(tensor: Tensor) -> Mapping[str, Any]:
    told: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    values = tensor.abs() if tensor.is_complex() else tensor
    finite = values[values.isfinite()].double()
    told["nonfinite"] = values.numel() - finite.numel()
    if finite.numel():
        sizes = finite.abs()
        nonzero = sizes[sizes > 0]
        told |= {"min": finite.min().item(), "max": finite.max().item(), "zeros": finite.numel() - nonzero.numel()}
        told["smallest"] = nonzero.min().item() if nonzero.numel() else 0.0
    return told
