"""Where a line calls us instead of its operation: the user's source, parsed, with some of its nodes replaced.

Only the compiled copy changes, never the file. Its names say what they stand for: `__armor_method_of_log__`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from resilient_train.extensions.armor import replacements
from resilient_train.extensions.armor.operations import (
    computes,
    family,
    is_in_place,
    is_pointwise,
    is_random,
    torchs_name,
)

PREFIX = "__armor_"

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Div: "div",
    ast.Mult: "mul",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
_MAY_OVERFLOW = (
    *("exp", "exp2", "expm1", "cosh", "sinh", "i0", "i1", "square", "mul"),
    *("sum", "cumsum", "prod", "cumprod", "det"),
)
_OF_WHOLE_TENSORS = (  # that compute the same in any type, next to the pointwise ones
    *("sum", "mean", "cumsum", "logsumexp", "prod", "cumprod", "norm", "softmax", "log_softmax"),
    "det",
)
_THAT_MOVE_ELEMENTS = (
    *("view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "expand", "diagonal"),
    *("flip", "roll", "gather", "index_select"),
)
_LEAVES = (ast.Name, ast.Attribute, ast.Subscript)
_LOOK_AT_THEIR_CALLER = {"super", "locals", "globals", "vars", "dir", "eval", "exec"}

Node = ast.Call | ast.BinOp | ast.AugAssign


class CannotArmor(Exception):
    """The line cannot be patched. The message says why, in one line for a person."""


class LineChanged(CannotArmor):
    """The function has no such line any more: a person has changed it since it was patched."""


@dataclass(frozen=True, slots=True)
class Target:
    line: int
    op: str  # as torch names the function


def replacement(name: str) -> Callable[..., Any]:
    form, _, of = name.removeprefix(PREFIX).removesuffix("__").partition("_of_")
    function: Callable[..., Any] = getattr(replacements, form)
    return function(of) if of else function


def patch(tree: ast.Module, targets: set[Target], names: dict[str, Any]) -> None:
    """Replace the guilty nodes of a module; its globals say what `ln` is after `from torch import log as ln`."""
    chosen = {node for target in targets for node in _guilty(tree, target, names)}
    to_widen, behind = _to_widen(tree, chosen, names)
    _Rewriter(chosen | behind, names, to_widen).visit(tree)


def _guilty(tree: ast.Module, target: Target, names: dict[str, Any]) -> list[Node]:
    """Return the nodes of a line that name an operation, else all that compute: it was called within torch then."""
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, Node) and node.lineno <= target.line <= (node.end_lineno or node.lineno)
    ]
    by_name = [node for node in nodes if target.op and family(target.op) == _family(node, names)]
    found = _nearest(by_name, target.line) or _nearest([one for one in nodes if _may_compute(one)], target.line)
    if not (found := [node for node in found if not _is_in_place(node)]):
        raise CannotArmor(f"nothing is computed in line {target.line}, or only in place")
    return found


def _is_in_place(node: Node) -> bool:
    """Say whether it writes into a tensor, which others may share: that is not patched."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return is_in_place(node.func.attr)
    return isinstance(node, ast.AugAssign)


def _to_widen(tree: ast.Module, chosen: set[Node], names: dict[str, Any]) -> tuple[set[ast.AST], set[Node]]:
    """Return the largest expressions around guilty nodes of which a wider type may hold what is in between.

    `torch.log(torch.exp(x).sum())`: what overflows there has a logarithm. All of it can be evaluated again. Also return
    what is computed there from what is repaired.
    """
    expressions = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    around = {child: node for node in expressions for child in ast.iter_child_nodes(node)}
    found: set[ast.AST] = set()
    behind: set[Node] = set()
    for node in chosen:
        # At a pole a wider type has no slope either, unless what is computed there has only rounded to 0.
        name = _family(node, names)
        if name not in _MAY_OVERFLOW and (name != "log" or _steps(node) == 1):
            continue
        outer: ast.AST = node
        path = set()
        while (larger := around.get(outer)) is not None:
            called = around.get(larger)
            if isinstance(larger, ast.Attribute) and isinstance(called, ast.Call) and called.func is larger:
                larger = called
            if not isinstance(larger, ast.Call | ast.BinOp | ast.UnaryOp) or not _is_repeatable(larger, names):
                break
            outer = larger
            path |= {outer} if isinstance(outer, Node) else set()
        if _steps(outer) > 1 and _is_repeatable(outer, names):
            found.add(outer)
            behind |= path
    return found, behind


def _steps(node: ast.AST) -> int:
    return sum(isinstance(one, ast.Call | ast.BinOp) for one in ast.walk(node))


def _is_repeatable(node: ast.AST, names: dict[str, Any]) -> bool:
    """Say whether an expression computes the same in any type, and again if it is evaluated twice."""
    if isinstance(node, ast.Constant | ast.Name):
        return True
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, [node.func.value]
            if isinstance(owner[0], ast.Name) and owner[0].id == "self":  # a module or method of the user's
                return False
        elif isinstance(node.func, ast.Name) and node.func.id in names:
            name, owner = torchs_name(names[node.func.id]), []
        else:
            return False
        fits = is_pointwise(name) or (family(name) in _OF_WHOLE_TENSORS and not name.endswith("_"))
        computes_the_same = fits and computes(name) and not is_random(name)
        if not computes_the_same and name not in _THAT_MOVE_ELEMENTS:
            return False
        return all(_is_repeatable(one, names) for one in (*owner, *node.args, *(one.value for one in node.keywords)))
    if isinstance(node, ast.BinOp) and (type(node.op) not in _OPERATORS or isinstance(node.op, ast.MatMult)):
        return False
    kinds = (ast.Attribute, ast.Subscript, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.Slice)
    parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
    return isinstance(node, kinds) and all(_is_repeatable(one, names) for one in parts)


class _Widener(ast.NodeTransformer):
    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, _LEAVES):
            is_module = isinstance(node, ast.Name) and isinstance(self.names.get(node.id), ModuleType)
            return node if is_module else _called("wide", [node], [], node)
        if not isinstance(node, ast.Call):
            return super().generic_visit(node)
        of_i0 = self._i0_in_a_logarithm(node)
        call = of_i0 or node
        if isinstance(call.func, ast.Attribute):
            call.func.value = self.visit(call.func.value)
        call.args = [self.visit(one) for one in call.args]
        for keyword in call.keywords:
            keyword.value = self.visit(keyword.value)
        if of_i0 is None:
            return node
        assert isinstance(of_i0.func, ast.Attribute)
        return _called("log_i0", [of_i0.func.value, *of_i0.args], [], node)

    def _i0_in_a_logarithm(self, node: ast.Call) -> ast.Call | None:
        """The call of i0 whose logarithm this is, as in the normalization of a von Mises density."""
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "log":
            return None
        inner = node.args[0] if node.args else node.func.value
        is_i0 = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "i0"
        return inner if isinstance(inner, ast.Call) and is_i0 and not inner.keywords else None


def _nearest(nodes: list[Node], line: int) -> list[Node]:
    """Of the nodes that cover a line, return those that a traceback would show there, else the innermost ones."""
    there = [node for node in nodes if line in (node.lineno, _line_in_traceback(node))]
    heights = [(node.end_lineno or node.lineno) - node.lineno for node in nodes]
    return there or [node for node, height in zip(nodes, heights, strict=True) if height == min(heights)]


def _line_in_traceback(node: Node) -> int:
    """The line of a method call is that of the method's name, unless something is unpacked into its arguments."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        unpacks = any(isinstance(one, ast.Starred) for one in node.args) or any(not one.arg for one in node.keywords)
        return node.lineno if unpacks else node.func.end_lineno or node.lineno
    return node.lineno


def _family(node: Node, names: dict[str, Any]) -> str | None:
    if not isinstance(node, ast.Call):
        return _OPERATORS.get(type(node.op))
    if isinstance(node.func, ast.Attribute):
        return family(node.func.attr)
    if isinstance(node.func, ast.Name):
        name = node.func.id
        return family(torchs_name(names[name]) if name in names else name)
    return None


def _may_compute(node: Node) -> bool:
    if not isinstance(node, ast.Call):
        return type(node.op) in _OPERATORS
    if isinstance(node.func, ast.Attribute):
        return computes(node.func.attr)
    return not isinstance(node.func, ast.Name) or node.func.id not in _LOOK_AT_THEIR_CALLER


class _Rewriter(ast.NodeTransformer):
    """Replaces nodes at the places where they are, so that tracebacks stay what they were."""

    def __init__(self, chosen: set[Node], names: dict[str, Any], to_widen: set[ast.AST]) -> None:
        self.chosen, self.names, self.to_widen = chosen, names, to_widen

    def visit(self, node: ast.AST) -> Any:
        if node not in self.to_widen:
            return super().visit(node)
        assert isinstance(node, ast.expr)
        bare, wide = deepcopy(node), _Widener(self.names).visit(deepcopy(node))
        return _called("widened", [super().visit(node), wide, bare], [], node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        line = _line_in_traceback(node)
        self.generic_visit(node)
        if node not in self.chosen:
            return node
        function = node.func
        name, first = "call", function
        if isinstance(function, ast.Attribute) and not _is_special(function):
            name, first = f"method_of_{function.attr}", function.value
        call = _called(name, [first, *node.args], node.keywords, node)
        if isinstance(function, ast.Attribute) and line != node.lineno:
            call.lineno, call.col_offset = line, (function.end_col_offset or 0) - len(function.attr)
        return call

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if node not in self.chosen:
            return node
        return _called(f"operation_of_{_OPERATORS[type(node.op)]}", [node.left, node.right], [], node)


def _is_special(function: ast.Attribute) -> bool:
    """Say whether an attribute cannot be looked up from elsewhere: `super().it`, and the private `self.__it`."""
    owner = function.value
    is_super = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return is_super or function.attr.startswith("__")


def _called(name: str, arguments: list[ast.expr], keywords: list[ast.keyword], at: ast.AST) -> ast.Call:
    """A call of ours. Its name has underscores at its end too, or a class would make it a private one."""
    function = ast.copy_location(ast.Name(f"{PREFIX}{name}__", ast.Load()), at)
    return ast.copy_location(ast.Call(function, arguments, keywords), at)
