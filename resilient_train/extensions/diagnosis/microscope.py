"""Watches every operation of a forward and a backward for the one that first makes a value that is not finite.

Torch's functions are seen as the user's code calls them, one call each, with their line. What the backward of a call
does is seen at the nodes that the call has put into the graph. NaN and infinity are kept apart: an infinite value on
purpose, such as a mask's, is not a fault until it becomes a NaN or reaches the loss.

What runs outside of those functions (numpy, TorchScript, other threads) is seen by what it leaves: its tensors by the
memory that they share with known ones, its nodes by the line that autograd's anomaly mode has kept for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from resilient_train.core.tree import leaves
from resilient_train.extensions.diagnosis.verdict import Origin, is_plain
from resilient_train.ground.operations import is_in_place, is_random, op_name
from resilient_train.parts.code_lines import CALLERS, Line, is_users, line_of, user_line

_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "resize", "resize_as", "set")
_ATTRIBUTES = ("T", "mT", "H", "mH", "real", "imag", "data")  # that run operations
_IN_TRACEBACK = re.compile(r'File "(.+)", line (\d+), in ')


class Microscope(TorchFunctionMode):
    """Enter it around forward and backward; `origin` is what it saw."""

    def __init__(self, model: nn.Module, is_patched: Callable[[str, int, str], bool]) -> None:
        super().__init__()
        self.of_loss: Origin | None = None  # of the value that made the loss what it is
        self.backward: Origin | None = None  # the first one in backward
        self.of_error: Origin | None = None  # of the exception that ended forward or backward
        self._names = {id(module): name for name, module in model.named_modules()}
        self._calls, self._is_patched = 0, is_patched
        # By memory, what is not finite and its origin, None if it came with the batch or the weights. The newest
        # tensor of those that share it is kept, as memory is reused.
        self._origins: dict[int, tuple[Tensor, Origin | None]] = {}
        self._nodes: dict[Any, Origin] = {}  # the call that each belongs to
        self._hooks: list[Any] = []
        self._has_spread = False  # some node has passed on a gradient that is not finite
        self._losses: list[Tensor] = []
        self._of_batch = WeakIdKeyDictionary()  # by tensor: whether it came with the batch, or was made of such alone
        self._of_repaired = WeakIdKeyDictionary()  # by tensor: what broke in a patch on the way to it
        self._raised: tuple[BaseException, Origin] | None = None  # the newest exception of an operation
        self._keep_lines: Any = None
        self._came_with([*model.parameters(), *model.buffers()])

    def knows(self, batch: Any) -> None:
        """Note what comes with a batch: what is not finite there is the fault of no operation."""
        tensors = [one for one in leaves(batch) if isinstance(one, Tensor)]
        self._of_batch.update(dict.fromkeys(tensors, True))
        self._came_with(tensors)

    def _came_with(self, tensors: list[Tensor]) -> None:
        self._origins |= {_place(one): (one, None) for one in broken(tensors)}

    def __enter__(self) -> Microscope:
        self._keep_lines = torch.autograd.set_detect_anomaly(True, check_nan=False)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._keep_lines.__exit__(*exc)
        if isinstance(exc[1], Exception):
            self.of_error = self._of_error(exc[1])
        self._raised = None
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and not kwargs.get("inputs"):
            return self._run_backward(*args, **kwargs)
        name = getattr(func, "__name__", "")
        in_place = is_in_place(name) or name == "__set__"
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in _ATTRIBUTES:
                return func(*args, **kwargs)
        arguments = args, {key: value for key, value in kwargs.items() if key != "out"}
        inputs = floating(arguments)
        was = [kinds_of(one) for one in inputs] if in_place else []
        tensors = [one for one in leaves(arguments) if isinstance(one, Tensor)]
        is_of_data = bool(tensors) and all(one in self._of_batch and self._of_batch[one] for one in tensors)
        call = Origin(op_name(name), user_line(self._names), self._calls, is_of_data, after=self._made_up(tensors))
        self._calls += 1
        if in_place:
            call = replace(call, inputs=statistics(inputs))
        outer, is_slope = self.backward, func is torch.autograd.grad
        if is_slope:
            self.backward = None
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._raised = error, self._made(inputs) or replace(call, kind="error", inputs=statistics(inputs))
            raise
        with torch._C.DisableTorchFunction():
            outputs = floating(args[:1] if in_place and result is None else result)
            if outputs and not in_place:
                call = replace(call, inputs=statistics(inputs))
            returned = [one for one in leaves(outputs if result is None else result) if isinstance(one, Tensor)]
            self._of_batch.update(dict.fromkeys(returned, is_of_data and not is_random(call.op)))
            if call.after is not None:
                self._of_repaired.update(dict.fromkeys(returned, call.after))
            for output in outputs:
                if not (kinds := kinds_of(output)):
                    continue
                made = replace(call, kind=max(kinds), is_scalar=output.numel() == 1)  # "nan" rather than "inf"
                origin = (self.backward if is_slope else None) or self._origin(made, kinds, arguments, was)
                self._origins[_place(output)] = output, origin
                if origin is not None and origin.call == call.call and self._is_in_patch(call):
                    self._of_repaired[output] = call.after or origin
            self._watch(inputs)
            self._watch(outputs, call if in_place else replace(call, of_inputs=self._made(inputs)))
        if is_slope:
            self.backward, self._has_spread = outer, False
        return result

    @property
    def origin(self) -> Origin | None:
        """The culprit. Where a loss is not finite no gradient can be, and backward says nothing about the cause."""
        return self.of_error or (self.of_loss if broken(self._losses) else self.backward)

    def judge(self, loss: Tensor) -> None:
        """Find the origin of a loss that is not finite, and watch what is left of the graph."""
        self._losses.append(loss)
        with torch._C.DisableTorchFunction():
            self._watch([loss])
            if self.of_loss is None and (kinds := kinds_of(loss)):
                end = Origin("", None, self._calls, kind=max(kinds))
                self.of_loss = self._first([loss]) or self._unseen([loss], end)

    def _of_error(self, error: Exception) -> Origin | None:
        """The origin of an exception: the first NaN before it, the operation that raised, or its line. What Python code
        of torch raises, such as a distribution that checks its parameters, is no operation's.
        """
        if self._raised is not None and self._raised[0] is error:
            return self._raised[1]
        known = (one for tensor, one in self._origins.values() if one is not None and kinds_of(tensor))
        made = (one for one in known if one.kind == "nan" and not one.was_given)
        if first := min(made, key=lambda one: one.call, default=None):
            return first
        found = line_of(error, self._names)
        if found.of_distribution:
            return Origin(found.called, found.line, kind="domain", inputs=statistics(floating(found.refused)))
        return Origin(found.called, found.line, kind="error") if found.line is not None else None

    def _origin(self, made: Origin, kinds: set[str], arguments: Any, was: Sequence[set[str]]) -> Origin | None:
        """The origin of a bad result: an input's, this call, or None: the batch's. `was`: what in-place inputs held."""
        inputs = floating(arguments)
        before = was or [kinds_of(one) for one in inputs]
        bad, had = [one for one, its in zip(inputs, before, strict=True) if its], set().union(*before)
        if inherited := self._made(bad):
            return inherited
        if "nan" in had or ("nan" not in kinds and "inf" in had):
            return self._first(bad) or self._unseen(bad, made)
        given = kinds_of_numbers(arguments)
        if made.kind in given or (made.kind == "inf" and given) or made.op in _UNFILLED:
            return replace(made, was_given=True)
        return made

    def _first(self, tensors: Iterable[Tensor]) -> Origin | None:
        """The earliest origin of tensors; what was given counts only if nothing else does."""
        known = (self._origins[_place(one)][1] for one in tensors if _place(one) in self._origins and kinds_of(one))
        return min(filter(None, known), key=lambda one: (one.was_given, one.call), default=None)

    def _made(self, tensors: Iterable[Tensor]) -> Origin | None:
        first = self._first(tensors)
        return first if first is not None and not first.was_given else None

    def _unseen(self, bad: Iterable[Tensor], call: Origin) -> Origin | None:
        """The origin of what no call that was seen has returned: by its node, else the call that it was given to."""
        strange = [one for one in bad if _place(one) not in self._origins]
        made = [_call_of(one.grad_fn) for one in strange if one.grad_fn is not None]
        given = replace(call, was_given=True)
        found = next((one for one in made if one.line is not None), given)
        return replace(found, kind=call.kind, call=call.call) if strange and found.line is not None else None

    def _is_in_patch(self, call: Origin) -> bool:
        return call.line is not None and self._is_patched(call.line.file, call.line.line, call.op)

    def _made_up(self, tensors: Iterable[Tensor]) -> Origin | None:
        """The first repaired operation that any of these tensors was computed from."""
        known = (self._of_repaired[one] for one in tensors if one in self._of_repaired)
        return min(known, key=lambda one: one.call, default=None)

    def _run_backward(
        self,
        loss: Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run backward under the microscope, too: hooks run in it, and reentrant checkpoints compute again."""
        slope = torch.ones_like(loss) if gradient is None else gradient
        keeps = create_graph if retain_graph is None else retain_graph
        super().__enter__()  # type: ignore[no-untyped-call]
        try:  # what `loss.backward` ends in: called by that name it would come back here
            _engine_run_backward((loss,), (slope,), keeps, create_graph, (), True, accumulate_grad=True)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _watch(self, tensors: Iterable[Tensor], call: Origin | None = None) -> None:
        """Listen at every node that this call has put into the graph, and at those below that no call has. One of a
        slope that was computed in this call is that of its operation.
        """
        waiting: list[Any] = [one.grad_fn for one in tensors]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._nodes:
                continue
            if _is_custom(node):
                own = replace(_call_of(node), call=call.call if call is not None else -1)
            elif call is None or call.op == "grad":
                own = self._nodes.get(node.metadata.get("parent_")) or call or _call_of(node)
            else:
                own = call
            self._nodes[node] = own
            self._hooks.append(node.register_hook(partial(self._passed, node, own)))
            waiting += [before for before, _ in node.next_functions]

    def _passed(
        self, node: Any, call: Origin, grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]
    ) -> None:
        with torch._C.DisableTorchFunction():
            arrived, passed_on = broken(grad_outputs), broken(grad_inputs)
            is_first = not self._has_spread
            self._has_spread |= bool(arrived or passed_on)
            if self.backward is not None or not (arrived or passed_on):
                return
            made = None
            if arrived:  # a hook made it, or the sum of gradients of several paths
                made = self._first(arrived) if is_first else None
            elif not self._is_in_patch(call) and _is_custom(node):
                made = self._made(passed_on)  # an operation in a backward of the user's
            if made is not None:
                self.backward = replace(made, phase="backward")
            elif arrived or self._is_in_patch(call):
                return
            elif call.of_inputs is not None:  # the gradient is not finite because of the call's inputs
                self.backward = replace(call.of_inputs, is_of_data=False)  # the program masks that value
            else:  # a gradient that is merely too large comes from everything that the loss is computed from
                first = call.after or (self._made_up(self._losses) if is_plain(call.op) else None)
                kind = max(set().union(*map(kinds_of, passed_on)))
                self.backward = replace(call, phase="backward", kind=kind, after=first)


def _place(tensor: Tensor) -> int:
    """Where its values are. Views share that with their base, and so does what other code makes in that memory."""
    return memory_of(tensor) or id(tensor)


def _is_custom(node: Any) -> bool:
    return hasattr(node, "_forward_cls")


def _call_of(node: Any) -> Origin:
    """A node that no call has made as a call, at the user's line that did."""
    if _is_custom(node):
        return Origin(node._forward_cls.__name__, _made_at(node))
    name = re.sub(r"Backward\d*$", "", node.name()).rpartition("::")[2]
    return Origin(op_name(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()), _made_at(node))


def _made_at(node: Any) -> Line | None:
    """The user's line that a node was made at, which anomaly mode keeps."""
    for entry in reversed(node.metadata.get("traceback_") or ()):
        found = _IN_TRACEBACK.search(entry)
        if found and found[1] in CALLERS:
            break
        if found and is_users(found[1]):
            return Line(found[1], int(found[2]))
    return None


# What tensors hold: whether they are finite, in which range, and in which memory.


@contextmanager
def _unwatched() -> Iterator[None]:
    """Leave modes, gradients, and vmap, grad and jvp for a moment: within these no value may be looked at."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), temporarily_clear_interpreter_stack():
        yield


def floating(tree: Any) -> list[Tensor]:
    tensors = (one for one in tree_leaves(tree) if isinstance(one, Tensor))
    return [one for one in tensors if one.is_floating_point() or one.is_complex()]


@_unwatched()
def kinds_of(tensor: Tensor) -> set[str]:
    values = _values(tensor)
    if values.is_meta or bool(values.isfinite().all()):
        return set()
    kinds = {"nan": values.isnan(), "inf": values.isinf()}
    return {kind for kind, mask in kinds.items() if bool(mask.any())}


def broken(tree: Any) -> list[Tensor]:
    return [one for one in floating(tree) if kinds_of(one)]


def kinds_of_numbers(tree: Any) -> set[str]:
    """What the plain numbers of a tree are, such as the value of `masked_fill`."""
    numbers = [one for one in tree_leaves(tree) if isinstance(one, float)]
    return kinds_of(torch.tensor(numbers, dtype=torch.float64, device="cpu"))


@_unwatched()
def memory_of(tensor: Tensor) -> int | None:
    try:
        return _values(tensor).untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # it has none, or hides it
        return None


def statistics(tensors: Sequence[Tensor]) -> tuple[Mapping[str, Any], ...]:
    """The ranges of the first inputs of an operation."""
    return tuple(map(range_of, tensors[:4]))


@_unwatched()
def range_of(tensor: Tensor) -> dict[str, Any]:
    """Shape, type and range of the finite elements of a tensor, and the smallest magnitude. Waits for the device."""
    values = _values(tensor).detach()
    if values.is_complex():
        values = values.abs()
    finite = values[values.isfinite()]
    one: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    one["nonfinite"] = values.numel() - finite.numel()
    if finite.numel():
        one |= {"min": finite.min().item(), "max": finite.max().item(), "smallest": finite.abs().min().item()}
    return one


def _values(tensor: Tensor) -> Tensor:
    """The dense numbers behind a tensor, in a type that torch can compare."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.is_nested or tensor.layout is not torch.strided:
        values = tensor._values  # a method, but of a jagged tensor the values: its method does not work inside of torch
        tensor = values if isinstance(values, Tensor) else values() if tensor.is_sparse else tensor.values()
    return tensor.float() if tensor.element_size() == 1 else tensor
