"""Watches every operation of a forward and a backward for the one that first makes a value that is not finite.

Torch's functions are seen as the user's code calls them, one call each, with their line. What the backward of a call
does is seen at the nodes that the call has put into the graph. NaN and infinity are kept apart: an infinite value on
purpose, such as a mask's, is not a fault until it becomes a NaN.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from resilient_train.diagnose.frames import Line, is_users, user_line
from resilient_train.diagnose.verdict import is_plain
from resilient_train.numerics.operations import is_in_place, op_name
from resilient_train.types import Culprit

_MADE = ("full", "full_like", "new_full", "tensor", "as_tensor", "masked_fill", "fill", "fill_diagonal", "zeros_like")
_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "resize", "resize_as", "set")


@dataclass(frozen=True, slots=True)
class Origin:
    """An operation that made values that are not finite of values that are."""

    phase: str  # forward, backward
    op: str
    kind: str  # nan, inf
    call: int  # the number of the call in its forward
    line: Line | None
    inputs: tuple[Mapping[str, Any], ...] = ()
    is_scalar: bool = False  # its result is a single number
    after: Origin | None = None  # the first patched operation that broke on the way to it: this one is a consequence

    @property
    def culprit(self) -> Culprit:
        """The same as a record without torch."""
        line = self.line or Line("", 0)
        return Culprit(self.phase, self.op, line.module, line.file, line.line, self.inputs)


@dataclass(slots=True)
class _Call:
    number: int
    op: str
    line: Line | None
    of_inputs: Origin | None = None  # of inputs that are not finite


class Microscope(TorchFunctionMode):
    """Enter it around forward and backward; its public attributes are what it saw.

    To keep the inputs of every call would take the memory of all activations twice. So the inputs of a call whose
    backward is to blame are looked at in a second replay: `look_at` is its number.
    """

    def __init__(
        self, model: nn.Module, *, look_at: int | None = None, armored: Collection[tuple[str, int, str]] = ()
    ) -> None:
        """`armored` are patched operations by file, line and name: what they break is repaired after them."""
        super().__init__()
        self.of_loss: Origin | None = None  # of the value that made the loss what it is
        self.backward: Origin | None = None  # the first one in backward
        self.inputs: tuple[Mapping[str, Any], ...] = ()  # of the call number `look_at`
        self._armored = armored
        self._names = {id(module): name for name, module in model.named_modules()}
        self._look_at, self._calls = look_at, 0
        # By id, what is not finite and its origin, None if on purpose. The tensors are kept, as ids are reused.
        self._origins: dict[int, tuple[Tensor, Origin | None]] = {}
        self._nodes: dict[Any, _Call] = {}
        self._hooks: list[Any] = []
        self._repaired: dict[tuple[str, int], Origin] = {}  # by line: what broke in a patch and was replaced
        self._replaced: dict[Any, Origin] = {}  # by node: what that was computed from
        self._losses: list[Any] = []  # their nodes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "backward"):
            return func(*args, **kwargs)  # what a reentrant checkpoint recomputes in there is not seen
        inputs = _floating((args, {key: value for key, value in kwargs.items() if key != "out"}))
        in_place = is_in_place(name)
        was = [_kinds(one) for one in inputs] if in_place else []
        call = _Call(self._calls, op_name(name), user_line(self._names))
        self._calls += 1
        if call.number == self._look_at:
            self.inputs = _statistics(inputs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            outputs = _floating(args[:1] if in_place and result is None else result)
            for output in outputs:
                if kinds := _kinds(output):
                    is_given = any(isinstance(one, float) and not isfinite(one) for one in tree_leaves((args, kwargs)))
                    origin = self._origin(call, kinds, inputs, was, is_given, output.numel() == 1)
                    self._origins[id(output)] = output, origin
                    if origin is not None and origin.call == call.number and self._is_armored(call):
                        self._remember_repair(origin, inputs)
                elif in_place:
                    self._origins.pop(id(output), None)
            if not in_place:
                call.of_inputs = self._first(inputs)
            self._watch(call, inputs, outputs)
        return result

    def judge(self, loss: Tensor) -> None:
        """Find the origin of a loss that is not finite."""
        self._losses.append(loss.grad_fn)
        self.of_loss = self._origins[id(loss)][1] if id(loss) in self._origins else None

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        for held in (self._hooks, self._nodes, self._origins, self._replaced, self._losses):
            held.clear()

    # Forward.

    def _origin(
        self,
        call: _Call,
        kinds: set[str],
        inputs: Sequence[Tensor],
        was: Sequence[set[str]],
        is_given: bool,
        is_scalar: bool,
    ) -> Origin | None:
        """The origin of a result that is not finite: that of an input, this call, or None if it is so on purpose.

        `was` says what the inputs of a call in place held before, and `is_given` whether a number among them is not
        finite.
        """
        before = was or [_kinds(one) for one in inputs]
        if inherited := self._first(one for one, its in zip(inputs, before, strict=True) if its):
            return inherited
        had = set().union(*before)
        if "nan" in had or ("nan" not in kinds and "inf" in had):
            return None  # it came in with the batch, or on purpose
        if call.op in _UNFILLED or (is_given and (call.op in _MADE or "nan" not in kinds)):
            return None
        kind, statistics = max(kinds), () if was else _statistics(inputs)  # "nan" rather than "inf"
        after = self._after([one.grad_fn for one in inputs], call.op)
        return Origin("forward", call.op, kind, call.number, call.line, statistics, is_scalar, after)

    def _first(self, inputs: Iterable[Tensor]) -> Origin | None:
        """The earliest origin of inputs."""
        origins = [self._origins[id(one)][1] for one in inputs if id(one) in self._origins]
        return min(filter(None, origins), key=lambda one: one.call, default=None)

    # Consequences of patched operations.

    def _is_armored(self, call: _Call) -> bool:
        return call.line is not None and (call.line.file, call.line.line, call.op) in self._armored

    def _remember_repair(self, origin: Origin, inputs: Iterable[Tensor]) -> None:
        """Note what a patch is about to repair: later values may be computed from that line, or from its inputs."""
        assert origin.line is not None
        self._repaired.setdefault((origin.line.file, origin.line.line), origin)
        for node in [one.grad_fn for one in inputs if one.grad_fn is not None]:
            self._replaced.setdefault(node, origin)
            for before, _ in node.next_functions if _is_custom(node) else ():
                if before is not None:
                    self._replaced.setdefault(before, origin)

    def _after(self, nodes: Iterable[Any], op: str) -> Origin | None:
        """The first repaired operation that these nodes depend on, or the same operation of the same values."""
        if not self._repaired:
            return None
        met, waiting, found = {None}, list(nodes), []
        while waiting:
            node = waiting.pop()
            if node in met:
                continue
            met.add(node)
            waiting += [before for before, _ in node.next_functions]
            call, given = self._nodes.get(node), self._replaced.get(node)
            if call is not None and call.line is not None:
                found.append(self._repaired.get((call.line.file, call.line.line)))
            if given is not None and given.op == op:
                found.append(given)
        return min((one.after or one for one in found if one), key=lambda one: one.call, default=None)

    # Backward.

    def _watch(self, call: _Call, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Listen at every node that this call has put into the graph."""
        for one in inputs:
            if one.grad_fn is not None and one.grad_fn not in self._nodes:  # not made by a function of torch's
                self._listen(one.grad_fn, _call_of(one.grad_fn, call))
        waiting: list[Any] = [output.grad_fn for output in outputs]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._nodes or node.name().endswith("AccumulateGrad"):
                continue
            self._listen(node, _call_of(node, call) if _is_custom(node) else call)
            waiting += [before for before, _ in node.next_functions]

    def _listen(self, node: Any, call: _Call) -> None:
        self._nodes[node] = call
        is_armored = self._is_armored(call)

        def passed(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
            if self.backward is not None or is_armored:
                return
            with torch._C.DisableTorchFunction():
                kinds = set().union(*map(_kinds, _floating(grad_inputs)))
                if not kinds or any(map(_kinds, _floating(grad_outputs))):
                    return
                if call.of_inputs is not None:  # the gradient is not finite because of the call's inputs
                    self.backward = call.of_inputs
                    return
                # A gradient that is merely too large comes from everything that the loss is computed from.
                first = self._after([node, *self._losses] if is_plain(call.op) else [node], call.op)
                self.backward = Origin("backward", call.op, max(kinds), call.number, call.line, after=first)

        self._hooks.append(node.register_hook(passed))


def _is_custom(node: Any) -> bool:
    """Say whether a node is of a user's own autograd.Function."""
    return hasattr(node, "_forward_cls")


def _call_of(node: Any, call: _Call) -> _Call:
    """The backward of a user's own autograd.Function as a call with a line; any other node by its name alone."""
    if not _is_custom(node):
        return _Call(-1, node.name().removesuffix("0").removesuffix("Backward"), None)
    kind, line = node._forward_cls, None
    try:
        lines, first = inspect.getsourcelines(kind.backward)
        at = next(first + place for place, text in enumerate(lines) if text.lstrip().startswith("def "))
        if is_users(file := inspect.getsourcefile(kind) or ""):
            line = Line(file, at)
    except (OSError, TypeError, StopIteration):
        pass
    return _Call(call.number, kind.__name__, line)


def _floating(tree: Any) -> list[Tensor]:
    """The tensors of a tree that can hold NaN and infinity."""
    tensors = [one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.layout is torch.strided]
    return [one for one in tensors if one.is_floating_point() or one.is_complex()]


def _kinds(tensor: Tensor) -> set[str]:
    """What a tensor holds that is not finite: nan, inf."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if tensor.is_meta or bool(tensor.isfinite().all()):
            return set()
        kinds = {"nan": tensor.isnan(), "inf": tensor.isinf()}
        return {kind for kind, mask in kinds.items() if bool(mask.any())}


def _statistics(tensors: Sequence[Tensor]) -> tuple[Mapping[str, Any], ...]:
    """Shape, type and range of the first inputs of an operation."""
    found: list[dict[str, Any]] = []
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for tensor in [one.detach() for one in tensors[:4]]:
            values = tensor.abs() if tensor.is_complex() else tensor
            finite = values[values.isfinite()].double()
            one: dict[str, Any] = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "nonfinite": values.numel() - finite.numel(),
            }
            if finite.numel():
                sizes = finite.abs()
                nonzero = sizes[sizes > 0]
                one |= {
                    "min": finite.min().item(),
                    "max": finite.max().item(),
                    "zeros": finite.numel() - nonzero.numel(),
                    "smallest": nonzero.min().item() if nonzero.numel() else 0.0,
                }
            found.append(one)
    return tuple(found)
