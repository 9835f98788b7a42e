"""Watches every operation of a forward and a backward for the one that first makes a value that is not finite.

Torch's functions are seen as the user's code calls them, one call each, with their line. What the backward of a call
does is seen at the nodes that the call has put into the graph. NaN and infinity are kept apart: an infinite value on
purpose, such as a mask's, is not a fault until it becomes a NaN or reaches the loss.

What runs outside of those functions (numpy, TorchScript, other threads) is seen by what it leaves: its tensors by the
memory that they share with known ones, its nodes by the line that autograd's anomaly mode has kept for each.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from resilient_train.diagnose.frames import (
    REPLAY,
    Line,
    floating,
    is_users,
    kinds_of,
    kinds_of_numbers,
    line_of,
    memory_of,
    statistics,
    user_line,
)
from resilient_train.diagnose.singular import is_plain
from resilient_train.diagnose.verdict import Observations
from resilient_train.numerics.armor import is_patched
from resilient_train.numerics.operations import is_in_place, op_name
from resilient_train.state.tree import leaves
from resilient_train.types import Culprit

_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "resize", "resize_as", "set")
_ATTRIBUTES = ("T", "mT", "H", "mH", "real", "imag", "data")  # that run operations
_LEAVES_TORCH = ("item", "tolist", "numpy", "__float__", "__int__", "__index__", "__complex__", "__array__")
_IN_TRACEBACK = re.compile(r'File "(.+)", line (\d+), in ')


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
    is_of_data: bool = False  # all that it was given comes from the batch
    was_given: bool = False  # it did not make them: the program gave them to it, as a constant or from outside of torch

    @property
    def culprit(self) -> Culprit:
        """The same as a record without torch."""
        line = self.line or Line("", 0)
        return Culprit(self.phase, self.op, line.module, line.file, line.line, self.inputs)

    def noted(self, facts: Observations) -> Observations:
        after = self.after.culprit if self.after is not None else None
        facts = replace(facts, culprit=self.culprit, kind=self.kind, is_scalar=self.is_scalar)
        return replace(facts, was_given=self.was_given, after=after)


@dataclass(slots=True)
class _Call:
    number: int
    op: str
    line: Line | None
    is_of_data: bool = False
    of_inputs: Origin | None = None  # of inputs that are not finite

    @property
    def is_patched(self) -> bool:
        return self.line is not None and is_patched(self.line.file, self.line.line, self.op)


class Microscope(TorchFunctionMode):
    """Enter it around forward and backward; its public attributes are what it saw.

    To keep the inputs of every call would take the memory of all activations twice. So the inputs of a call whose
    backward is to blame are looked at in a second replay: `look_at` is its number.
    """

    def __init__(self, model: nn.Module, *, look_at: int | None = None) -> None:
        super().__init__()
        self.of_loss: Origin | None = None  # of the value that made the loss what it is
        self.backward: Origin | None = None  # the first one in backward
        self.of_error: Origin | None = None  # of the exception that ended forward or backward
        self.inputs: tuple[Mapping[str, Any], ...] = ()  # of the call number `look_at`
        self._names = {id(module): name for name, module in model.named_modules()}
        self._look_at, self._calls = look_at, 0
        # By id, what is not finite and its origin, None if it came with the batch or the weights. The tensors are
        # kept, as ids are reused. By memory, the newest of those that share it.
        self._origins: dict[int, tuple[Tensor, Origin | None]] = {}
        self._by_memory: dict[int, Origin | None] = {}
        self._nodes: dict[Any, _Call] = {}
        self._hooks: list[Any] = []
        self._has_spread = False  # some node has passed on a gradient that is not finite
        self._repaired: dict[tuple[str, int], Origin] = {}  # by line: what broke in a patch and was replaced
        self._replaced: dict[Any, Origin] = {}  # by node: what that was computed from
        self._losses: list[Any] = []  # their nodes
        self._raised: tuple[BaseException, Origin] | None = None  # the newest exception of an operation
        self._of_batch = WeakIdKeyDictionary()  # tensors of the batch, and those that were made of these alone
        self._is_mixed = False  # what else the program holds may have come into those: a number, or a write in place
        self._keep_lines: Any = None
        self._is_given([*model.parameters(), *model.buffers()])

    def knows(self, batch: Any) -> None:
        """Note what comes with a batch: what is not finite there is the fault of no operation."""
        self._of_batch = WeakIdKeyDictionary(dict.fromkeys(self._is_given(leaves(batch)), True))
        self._is_mixed = False

    def _is_given(self, given: Iterable[Any]) -> list[Tensor]:
        tensors = [one for one in given if isinstance(one, Tensor)]
        for one in floating(tensors):
            if kinds_of(one):
                self._note(one, None)
        return tensors

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
        for held in (self._hooks, self._nodes, self._origins, self._by_memory, self._replaced, self._losses):
            held.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is Tensor.backward and not kwargs.get("inputs"):
            return self._run_backward(*args, **{key: value for key, value in kwargs.items() if key != "inputs"})
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute not in _ATTRIBUTES:
                return func(*args, **kwargs)
            in_place, name = name == "__set__", attribute
        else:
            in_place = is_in_place(name)
        inputs = floating((args, {key: value for key, value in kwargs.items() if key != "out"}))
        was = [kinds_of(one) for one in inputs] if in_place else []
        op = op_name(name)
        given_tensors = [one for one in leaves((args, kwargs)) if isinstance(one, Tensor)]
        is_of_data = bool(given_tensors) and all(one in self._of_batch for one in given_tensors) and not self._is_mixed
        written = args[0] if in_place and args else kwargs.get("out")
        self._is_mixed |= not is_of_data and (name in _LEAVES_TORCH or written in self._of_batch)
        call = _Call(self._calls, op, user_line(self._names), is_of_data)
        self._calls += 1
        if call.number == self._look_at:
            self.inputs = statistics(inputs)
        outer, self.backward = (self.backward, None) if func is torch.autograd.grad else (None, self.backward)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            made = Origin("forward", op, "error", call.number, call.line, statistics(inputs), is_of_data=is_of_data)
            born = self._first(inputs)
            self._raised = error, made if born is None or born.was_given else born
            raise
        with torch._C.DisableTorchFunction():
            outputs = floating(args[:1] if in_place and result is None else result)
            if is_of_data and "rand" not in op and op not in ("dropout", "bernoulli"):
                self._of_batch.update({one: True for one in leaves(result) if isinstance(one, Tensor)})
            for output in outputs:
                if not (kinds := kinds_of(output)):
                    self._origins.pop(id(output), None)
                    continue
                given = kinds_of_numbers((args, kwargs))
                origin = self._origin(call, kinds, inputs, was, given, output.numel() == 1)
                if func is torch.autograd.grad and self.backward is not None:
                    origin = self.backward
                self._note(output, origin)
                if origin is not None and origin.call == call.number and call.is_patched:
                    self._remember_repair(origin, inputs)
            if not in_place:
                origin = self._first(inputs)
                call.of_inputs = None if origin is None or origin.was_given else origin
            self._watch(call, inputs, outputs)
        if func is torch.autograd.grad:
            self.backward, self._has_spread = outer, False
        return result

    def judge(self, loss: Tensor) -> None:
        """Find the origin of a loss that is not finite, and watch what is left of the graph."""
        self._losses.append(loss.grad_fn)
        with torch._C.DisableTorchFunction():
            self._watch(None, [loss], [])
            if kinds := kinds_of(loss):
                self.of_loss = self._first([loss]) or self._unseen([loss], kinds, None)

    def _of_error(self, error: Exception) -> Origin | None:
        """The origin of an exception: the first NaN that was made before it, the operation that raised, or its line.

        What Python code of torch raises, such as a distribution that checks its parameters, is no operation's.
        """
        if self._raised is not None and self._raised[0] is error:
            return self._raised[1]
        known = (one for _, one in self._origins.values() if one is not None)
        made = (one for one in known if one.kind == "nan" and not one.was_given)
        if first := min(made, key=lambda one: one.call, default=None):
            return first
        found = line_of(error, self._names)
        if found.of_distribution:
            ranges = statistics(floating([found.refused])) if found.refused is not None else ()
            return Origin("forward", found.of_distribution, "domain", -1, found.line, ranges)
        return Origin("forward", found.called, "error", -1, found.line) if found.line is not None else None

    # Forward.

    def _note(self, tensor: Tensor, origin: Origin | None) -> None:
        self._origins[id(tensor)] = tensor, origin
        if (memory := memory_of(tensor)) is not None:
            self._by_memory[memory] = origin

    def _origin(
        self,
        call: _Call,
        kinds: set[str],
        inputs: Sequence[Tensor],
        was: Sequence[set[str]],
        given: set[str],
        is_scalar: bool,
    ) -> Origin | None:
        """The origin of a result that is not finite: that of an input, this call, or None if it came with the batch.

        `was` says what the inputs of a call in place held before, and `given` what the numbers among them are.
        """
        before = was or [kinds_of(one) for one in inputs]
        bad, had = [one for one, its in zip(inputs, before, strict=True) if its], set().union(*before)
        inherited = self._first(bad)
        if inherited and not inherited.was_given:
            return inherited
        if "nan" in had or ("nan" not in kinds and "inf" in had):
            return inherited or self._unseen(bad, kinds, call)
        kind = max(kinds)  # "nan" rather than "inf"
        if kind in given or (kind == "inf" and given) or call.op in _UNFILLED:
            return Origin("forward", call.op, kind, call.number, call.line, was_given=True)
        after = self._after([one.grad_fn for one in inputs], call.op)
        ranges = () if was else statistics(inputs)
        return Origin("forward", call.op, kind, call.number, call.line, ranges, is_scalar, after, call.is_of_data)

    def _first(self, inputs: Iterable[Tensor]) -> Origin | None:
        """The earliest origin of inputs; what was given counts only if nothing else does."""
        known = (self._origins[id(one)][1] if id(one) in self._origins else self._shared(one) for one in inputs)
        return min(filter(None, known), key=lambda one: (one.was_given, one.call), default=None)

    def _shared(self, tensor: Tensor) -> Origin | None:
        origin = self._by_memory.get(memory_of(tensor) or 0)
        return origin if origin is not None and kinds_of(tensor) else None

    def _unseen(self, bad: Sequence[Tensor], kinds: set[str], call: _Call | None) -> Origin | None:
        """The origin of what no call that was seen has returned: by its node, else the call that it was given to."""
        strange = [one for one in bad if id(one) not in self._origins and memory_of(one) not in self._by_memory]
        if not strange:
            return None
        number = call.number if call is not None else self._calls
        for node in [one.grad_fn for one in strange if one.grad_fn is not None]:
            made = _call_of(node, forward=True)
            if made.line is not None:
                return Origin("forward", made.op, max(kinds), number, made.line)
        if call is None or call.line is None:
            return None
        return Origin("forward", call.op, max(kinds), number, call.line, was_given=True)

    # Consequences of patched operations.

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

    def _run_backward(
        self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Run backward under the microscope, too: hooks run in it, and reentrant checkpoints compute again."""
        gradient = torch.ones_like(loss) if gradient is None else gradient
        keeps = create_graph if retain_graph is None else retain_graph
        super().__enter__()  # type: ignore[no-untyped-call]
        try:  # what `loss.backward` ends in: called by that name it would come back here
            _engine_run_backward((loss,), (gradient,), keeps, create_graph, (), True, accumulate_grad=True)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _watch(self, call: _Call | None, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Listen at every node that this call has put into the graph, and at those below that no call has."""
        for is_own, tensors in ((False, inputs), (True, outputs)):
            waiting: list[Any] = [one.grad_fn for one in tensors]
            while waiting:
                node = waiting.pop()
                if node is None or node in self._nodes:
                    continue
                self._nodes[node] = self._call_at(node, call if is_own else None)
                self._listen(node, self._nodes[node])
                waiting += [before for before, _ in node.next_functions]

    def _call_at(self, node: Any, call: _Call | None) -> _Call:
        """The call that a node belongs to; one of a slope that was computed in this call is that of its operation."""
        number = call.number if call is not None else -1
        if _is_custom(node):
            return replace(_call_of(node), number=number)
        if call is None or call.op == "grad":
            forward = self._nodes.get(node.metadata.get("parent_"))
            return forward or call or _call_of(node)
        return call

    def _listen(self, node: Any, call: _Call) -> None:
        def passed(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
            with torch._C.DisableTorchFunction():
                arrived = [one for one in floating(grad_outputs) if kinds_of(one)]
                if arrived and not self._has_spread:  # a hook made it, or the sum of gradients of several paths
                    self._has_spread = True
                    if (made := self._first(arrived)) is not None and self.backward is None:
                        self.backward = replace(made, phase="backward")
                spoiled = [one for one in floating(grad_inputs) if kinds_of(one)]
                self._has_spread |= bool(spoiled)
                if not spoiled or arrived or self.backward is not None or call.is_patched:
                    return
                if _is_custom(node) and (made := self._first(spoiled)) is not None and not made.was_given:
                    self.backward = replace(made, phase="backward")  # an operation in a backward of the user's
                    return
                if call.of_inputs is not None:  # the gradient is not finite because of the call's inputs
                    self.backward = replace(call.of_inputs, is_of_data=False)  # the program masks that value
                    return
                # A gradient that is merely too large comes from everything that the loss is computed from.
                first = self._after([node, *self._losses] if is_plain(call.op) else [node], call.op)
                kind = max(set().union(*map(kinds_of, spoiled)))
                self.backward = Origin("backward", call.op, kind, call.number, call.line, after=first)

        self._hooks.append(node.register_hook(passed))


def _is_custom(node: Any) -> bool:
    """Say whether a node is of a user's own autograd.Function."""
    return hasattr(node, "_forward_cls")


def _call_of(node: Any, *, forward: bool = False) -> _Call:
    """A node that no call has made as a call; of a user's own autograd.Function the line is that of its backward."""
    if not _is_custom(node):
        name = re.sub(r"Backward\d*$", "", node.name()).rpartition("::")[2]
        return _Call(-1, op_name(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()), _made_at(node))
    kind, line = node._forward_cls, None
    try:
        lines, first = inspect.getsourcelines(kind.forward if forward else kind.backward)
        at = next(first + place for place, text in enumerate(lines) if text.lstrip().startswith("def "))
        if is_users(file := inspect.getsourcefile(kind) or ""):
            line = Line(file, at)
    except (OSError, TypeError, StopIteration):
        pass
    return _Call(-1, kind.__name__, line or _made_at(node))


def _made_at(node: Any) -> Line | None:
    """The user's line that a node was made at, which anomaly mode keeps."""
    for entry in reversed(node.metadata.get("traceback_") or ()):
        found = _IN_TRACEBACK.search(entry)
        if found and found[1] == REPLAY:
            break
        if found and is_users(found[1]):
            return Line(found[1], int(found[2]))
    return None
