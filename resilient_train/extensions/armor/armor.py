"""Armor: a patch around one guilty operation in the user's own code, whose source stays as it is.

Live functions get new code, compiled from the same source with the operation replaced (ast_patch.py). The replacement
(replacements.py) calls the operation, and then repairs what it broke (repair.py).

The source has to be what runs: compiled without a patch it must give the running code, to the last instruction. Line
numbers, names and closures stay what they were, so callers, tracebacks, decorators and hooks notice nothing.
"""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
import sys
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from resilient_train.extensions.armor.ast_patch import CannotArmor, PatchedLine, patch
from resilient_train.extensions.armor.replacements import BY_NAME, PREFIX

# Of the process, as functions are. None of these two is of a guard.
PATCHED: list[PatchedLine] = []
_ORIGINALS: dict[CodeType, CodeType] = {}  # of all code that was ever installed

# The code of a function before and after, with that of the functions around it, outermost first.
_Codes = tuple[CodeType, CodeType, tuple[CodeType, ...]]


def add(file: str, line: int, op: str) -> None:
    """Patch an operation, or with an empty `op` all of a line. Nothing has changed if this raises CannotArmor.

    Wherever nothing breaks, the code computes the same as before. Compiled code is compiled again at its next call.
    Earlier processes, such as data workers, keep their code.
    """
    check(file, line, op)
    patched = PatchedLine(file, line, linecache.getline(file, line).strip(), op)
    if patched not in PATCHED:
        PATCHED.append(patched)
        _install(file)


def is_patched(file: str, line: int, op: str) -> bool:
    """Say whether an operation is patched, by itself or with all of its line."""
    return any((one.file, one.line) == (file, line) and one.op in (op, "") for one in PATCHED)


def remove() -> None:
    """Remove all patches."""
    files = {one.file for one in PATCHED}
    PATCHED.clear()
    for file in files:
        _install(file)


def check(file: str, line: int, op: str) -> None:
    """Raise CannotArmor if `add` would; nothing changes, and nothing is compiled again."""
    functions = _live_functions(file)
    if not functions:
        raise CannotArmor(f"no live function comes from {file}")
    linecache.checkcache(file)
    if not linecache.getlines(file, functions[0].__globals__):
        raise CannotArmor(f"there is no source of {file}: code made by exec, or moved since, stays as it is")
    edited = f"{file} is not what runs: it was edited since it was imported"
    try:
        codes = _compiled(file, [PatchedLine(file, line, "", op)], functions[0].__globals__)
    except SyntaxError:
        raise CannotArmor(edited) from None
    guilty = [
        (before, around)
        for before, after, around in codes
        if before.co_flags & inspect.CO_OPTIMIZED  # a class body is no function
        and any(name.startswith(PREFIX) for name in after.co_names)  # itself, and not only one within it
    ]
    if not guilty:
        raise CannotArmor(f"line {line} of {file} is in no function, so it has run or is running")
    alive = {_original(function.__code__) for function in functions}
    for before, around in guilty:
        if alive.isdisjoint((before, *around)):
            raise CannotArmor(f"{edited}, or nothing that creates {before.co_qualname} is alive")


def _install(file: str) -> None:
    """Give all functions of a file the code with all patches, and the original code if there are none."""
    functions, patches = _live_functions(file), [one for one in PATCHED if one.file == file]
    codes = _compiled(file, patches, functions[0].__globals__) if patches else []
    new = {before: after for before, after, _ in codes if before != after}
    _ORIGINALS.update({after: before for before, after in new.items()})
    for function in functions:
        function.__globals__.update(BY_NAME)
        original = _original(function.__code__)
        function.__code__ = new.get(original, original)
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if getattr(compiler, "FRAME_COUNTER", compiler is not None):  # compiled code contains the old code
        torch.compiler.reset()  # where nothing is compiled, that only imports Inductor for CUDA: seconds


def _compiled(file: str, patches: Collection[PatchedLine], names: dict[str, Any]) -> list[_Codes]:
    """Return the code of all functions, before and after; not what a module or a class computes at import."""
    text = "".join(linecache.getlines(file, names))
    trees = ast.parse(text, file), ast.parse(text, file)
    patch(trees[1], patches, names)
    before, after = (compile(tree, file, "exec", dont_inherit=True) for tree in trees)
    return list(_pairs(before, after, ()))


def _original(code: CodeType) -> CodeType:
    return _ORIGINALS.get(code, code)


def _pairs(before: CodeType, after: CodeType, around: tuple[CodeType, ...]) -> Iterator[_Codes]:
    inner = _inner(before), _inner(after)
    if len(inner[0]) != len(inner[1]) or before.co_freevars != after.co_freevars:
        raise CannotArmor(f"{before.co_qualname} would not stay the same function")
    if before.co_name != "<module>":
        yield before, after, around
        around = (*around, before)
    for old, new in zip(*inner, strict=True):
        yield from _pairs(old, new, around)


def _inner(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]


def _live_functions(file: str) -> list[FunctionType]:
    functions = [thing for thing in gc.get_objects() if type(thing) is FunctionType]  # runs no code of the objects
    return [function for function in functions if function.__code__.co_filename == file]
