"""Where a line calls us instead of its operation: the user's source, parsed, with some of its nodes replaced.

Only the compiled copy changes, never the file. `x.log()` becomes `__armor_method__("log", x)`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from resilient_train.extensions.armor.replacements import PREFIX
from resilient_train.ground.operations import computes, family, is_in_place, is_random, overloads, torchs_name, writes

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Div: "truediv",
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
_REPEATABLE = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.Slice, ast.keyword),
    *(ast.expr_context, ast.operator, ast.unaryop),
)
_LOOK_AT_THEIR_CALLER = {"super", "locals", "globals", "vars", "dir", "eval", "exec"}

Node = ast.Call | ast.BinOp


class CannotArmor(Exception):
    """The line cannot be patched. The message says why, in one line for a person."""


@dataclass(frozen=True, slots=True)
class PatchedLine:
    """One patched operation."""

    file: str
    line: int
    text: str  # of the line, stripped: a resume finds out by it whether a person has changed the line
    op: str  # as torch names the function; "": all of the line


def patch(tree: ast.Module, lines: Collection[PatchedLine], names: dict[str, Any]) -> None:
    """Replace the guilty nodes of a module; its globals say what `ln` is after `from torch import log as ln`."""
    chosen = {node for one in lines for node in _guilty(tree, one, names)}
    _Rewriter(chosen, names).visit(tree)


def _guilty(tree: ast.Module, patched: PatchedLine, names: dict[str, Any]) -> list[Node]:
    """Return the nodes of a line that name an operation, else all that compute: it was called within torch then. Of
    those that cover the line they are the ones that begin there, if there are any.
    """
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, Node) and node.lineno <= patched.line <= (node.end_lineno or 0)
    ]
    by_name = [node for node in nodes if patched.op and family(patched.op) == family(_name(node, names))]
    found = [node for node in by_name or nodes if _may_compute(node)]
    if not found:
        raise CannotArmor(f"nothing is computed in line {patched.line}, or only in place")
    return [node for node in found if node.lineno == patched.line] or found


def _steps(node: ast.AST) -> int:
    return sum(isinstance(one, Node) for one in ast.walk(node))


def _is_repeatable(node: ast.AST, names: dict[str, Any]) -> bool:
    """Say whether an expression can be evaluated once more, in another type: no call but of torch's draws or writes."""
    if isinstance(node, ast.Call):
        owner, name = node.func, _name(node, names)
        is_own = isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "self"
        return not (is_own or is_random(name) or writes(name) or is_in_place(name)) and bool(overloads(name))
    return isinstance(node, _REPEATABLE)


class _Widener(ast.NodeTransformer):
    """Lets an expression take wide tensors. What else stands there passes `wide` as it is."""

    def visit_Name(self, node: ast.Name | ast.Attribute | ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        return _called("wide", [node], [], node)

    visit_Attribute = visit_Subscript = visit_Name


def _name(node: ast.AST, names: dict[str, Any]) -> str:
    """Return what is called there, as torch names it if it is torch's."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS.get(type(node.op), "")
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Name):
        return torchs_name(names[function.id]) if function.id in names else function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _may_compute(node: Node) -> bool:
    if not isinstance(node, ast.Call):
        return type(node.op) in _OPERATORS
    if isinstance(node.func, ast.Attribute):
        return computes(node.func.attr)
    return not isinstance(node.func, ast.Name) or node.func.id not in _LOOK_AT_THEIR_CALLER


class _Rewriter(ast.NodeTransformer):
    """Replaces nodes at the places where they are, so that tracebacks stay what they were."""

    def __init__(self, chosen: set[Node], names: dict[str, Any]) -> None:
        self.chosen, self.names, self.is_wide = chosen, names, False

    def visit(self, node: ast.AST) -> Any:
        if self.is_wide or not isinstance(node, ast.Call | ast.BinOp | ast.UnaryOp) or not self._has_wider(node):
            return super().visit(node)
        bare, wide = deepcopy(node), _Widener().visit(deepcopy(node))
        # What is computed from what is repaired, too.
        computed = [one for one in ast.walk(node) if isinstance(one, Node)]
        self.chosen |= {one for one in computed if not self.chosen.isdisjoint(ast.walk(one))}
        self.is_wide = True
        narrow = super().visit(node)
        self.is_wide = False
        return _called("widened", [narrow, wide, bare], [], node)

    def _has_wider(self, node: ast.AST) -> bool:
        """Say whether a wider type may hold what is in between, as in `torch.log(torch.exp(x).sum())`."""
        within = [*ast.walk(node)]
        # At a pole a wider type has no slope either, unless what is computed there has only rounded to 0.
        may_be = any(
            family(name := _name(one, self.names)) in _MAY_OVERFLOW or (name == "log" and _steps(one) > 1)
            for one in self.chosen.intersection(within)
        )
        return may_be and _steps(node) > 1 and all(_is_repeatable(one, self.names) for one in within)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if node not in self.chosen:
            return node
        function, arguments = node.func, [node.func, *node.args]
        if not isinstance(function, ast.Attribute):
            return _called("call", arguments, node.keywords, node)
        # A private name, as in `self.__log(x)`, means nothing elsewhere.
        if is_operation := bool(overloads(function.attr)) and not function.attr.startswith("__"):
            name = ast.copy_location(ast.Constant(function.attr), function)
            arguments = [name, function.value, *node.args]
        call = _called("method" if is_operation else "call", arguments, node.keywords, node)
        # A traceback shows the line of the method's name.
        call.lineno, call.col_offset = function.end_lineno or 0, (function.end_col_offset or 0) - len(function.attr)
        return call

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if node not in self.chosen:
            return node
        name = ast.copy_location(ast.Constant(_OPERATORS[type(node.op)]), node)
        return _called("operate", [name, node.left, node.right], [], node)


def _called(name: str, arguments: list[ast.expr], keywords: list[ast.keyword], at: ast.AST) -> ast.Call:
    function = ast.copy_location(ast.Name(f"{PREFIX}{name}__", ast.Load()), at)
    return ast.copy_location(ast.Call(function, arguments, keywords), at)
