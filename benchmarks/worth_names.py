"""Gives every decision of the library a name, notes which of them acted in a run, and switches them off by name.

A decision is an `if`, or a function that may return nothing: `resilient_train.core.loss.Jump.see`. It acted if the
test was true, or the function returned something. Switched off, the test is false, and the function returns at once
(None, or False).

`install()` has to come before the first import of the library; no file of it is changed.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "resilient_train"
LINES: dict[str, int] = {}  # that a decision takes, by its name
acted: set[str] = set()
off: set[str] = set()


def tested(name: str, value: Any) -> Any:
    """Note a test that is true."""
    if not value:
        return value
    acted.add(name)
    return name not in off and value


def returned(name: str, value: Any) -> Any:
    """Note a function that has returned something."""
    if value is not None and value is not False:
        acted.add(name)
    return value


class _Naming(ast.NodeTransformer):
    """Wraps the tests and the results of one module."""

    def __init__(self, module: str) -> None:
        self._path, self._known = [module], Counter[str]()

    def _name(self, name: str, node: ast.AST) -> str:
        self._known[name] += 1
        name += f" #{self._known[name]}" if self._known[name] > 1 else ""
        LINES[name] = (node.end_lineno or node.lineno) - node.lineno + 1  # type: ignore[attr-defined]
        return name

    def _within(self, node: Any) -> Any:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._within(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        kind = ast.unparse(node.returns) if node.returns is not None else ""
        is_generator = any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(node))
        neutral = None if kind.endswith("| None") else False if kind == "bool" else ...
        name = ".".join([*self._path, node.name])
        node = self._within(node)
        if neutral is not ... and not is_generator and not node.name.startswith("__"):
            name = self._name(name, node)
            for one in _own_returns(node.body):
                if one.value is not None:
                    one.value = _call("returned", name, one.value)
            leaves = ast.parse(f"if {name!r} in __worth__.off: return {neutral}").body[0]
            start = 1 if ast.get_docstring(node) is not None else 0
            node.body.insert(start, ast.fix_missing_locations(ast.copy_location(leaves, node.body[-1])))
        return node

    def visit_If(self, node: ast.If) -> Any:
        name = f"{'.'.join(self._path)}: {ast.unparse(node.test)}"
        self.generic_visit(node)
        is_typing = "TYPE_CHECKING" in name or "__name__" in name
        if len(self._path) > 1 and not is_typing:
            if isinstance(node.test, ast.NamedExpr):  # the name keeps its value
                node.test.value = node.test.value
            node.test = _call("tested", self._name(name, node), node.test)
        return node


def _own_returns(body: Sequence[ast.stmt]) -> list[ast.Return]:
    found = []
    for one in body:
        if isinstance(one, ast.Return):
            found.append(one)
        elif not isinstance(one, ast.FunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                found += _own_returns(getattr(one, field, []))
            for part in [*getattr(one, "handlers", []), *getattr(one, "cases", [])]:
                found += _own_returns(part.body)
    return found


def _call(function: str, name: str, value: ast.expr) -> ast.expr:
    called = ast.parse(f"__worth__.{function}({name!r}, 0)", mode="eval").body
    assert isinstance(called, ast.Call)
    for one in ast.walk(called):
        ast.copy_location(one, value)
    called.args[1] = value
    return called


class _Loader(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = _Naming(self.name).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> CodeType:  # never from the cache
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__worth__"] = sys.modules[__name__]
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def load_all() -> None:
    """Import every module of the library, so that all names are known."""
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def install() -> None:
    """Name the decisions of every module of the library that is imported from here on."""
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
