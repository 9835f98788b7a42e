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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from resilient_train.extensions.armor.ast_patch import CannotArmor, PatchedLine, patch
from resilient_train.extensions.armor.replacements import BY_NAME, PREFIX

__all__ = ["Armor", "CannotArmor", "PatchedLine", "is_patched"]


@dataclass(slots=True)
class Armor:
    """Patches operations in the user's own code. Wherever nothing breaks, the code computes the same as before.

    Compiled code is compiled again at its next call. Earlier processes, such as data workers, keep their code.
    """

    lines: list[PatchedLine] = field(default_factory=list)

    def add(self, file: str, line: int, op: str) -> PatchedLine:
        """Patch an operation, or with an empty `op` all of a line. Nothing has changed if this raises CannotArmor."""
        functions, source = _found(file)
        patched = source.checked(PatchedLine(file, line, source.line(line), op), functions)
        if patched not in self.lines:
            _SOURCES[source.filename] = source
            source.patches.append(patched)
            source.install(functions)
            self.lines.append(patched)
        return patched

    def check(self, file: str, line: int, op: str) -> None:
        """Raise CannotArmor if `add` would; nothing changes, and nothing is compiled again."""
        functions, source = _found(file)
        source.checked(PatchedLine(file, line, "", op), functions)

    def text(self, file: str, line: int) -> str:
        """Return what a line says now."""
        return _found(file)[1].line(line)

    def remove(self) -> None:
        """Remove all patches. What another Armor has patched as well stays patched."""
        for source in [*_SOURCES.values()]:
            own = [one for one in self.lines if one in source.patches]
            for one in own:
                source.patches.remove(one)
            if own:
                source.install(_live_functions(own[0].file))
            if not source.patches:
                del _SOURCES[source.filename]
        self.lines.clear()


class _Codes(NamedTuple):
    """The code of a function before and after, with that of the functions around it, outermost first."""

    before: CodeType
    after: CodeType
    around: tuple[CodeType, ...]


@dataclass(slots=True)
class _Source:
    filename: str  # as its code has it
    text: str
    patches: list[PatchedLine] = field(default_factory=list)  # one of two Armors is there twice

    def functions(self, patches: Collection[PatchedLine] = (), names: dict[str, Any] | None = None) -> list[_Codes]:
        """Return the code of all functions, before and after; not what a module or a class computes at import."""
        trees = ast.parse(self.text, self.filename), ast.parse(self.text, self.filename)
        patch(trees[1], patches, names or {})
        before, after = (compile(tree, self.filename, "exec", dont_inherit=True) for tree in trees)
        return list(_pairs(before, after, ()))

    def line(self, number: int) -> str:
        lines = self.text.split("\n")
        return lines[number - 1].strip() if number <= len(lines) else ""

    def install(self, functions: Sequence[FunctionType]) -> None:
        """Give all functions the code with all patches, and the original code if there are none."""
        codes = self.functions(self.patches, functions[0].__globals__) if self.patches else []
        new = {before: after for before, after, _ in codes if before != after}
        for before, after in new.items():
            _ORIGINALS.setdefault(after, before)
        for function in functions:
            function.__globals__.update(BY_NAME)
            original = _original(function.__code__)
            if original in new:
                _ORIGINALS[new[original]] = original  # the very code it had, not an equal one
            if function.__code__ is not new.get(original, original):
                function.__code__ = new.get(original, original)
        compiler = sys.modules.get("torch._dynamo.convert_frame")
        if getattr(compiler, "FRAME_COUNTER", compiler is not None):  # compiled code contains the old code
            torch.compiler.reset()  # where nothing is compiled, that only imports Inductor for CUDA: seconds

    def checked(self, patched: PatchedLine, functions: Sequence[FunctionType]) -> PatchedLine:
        """Return what is to be patched; raise CannotArmor if it cannot be."""
        alive = {_original(function.__code__) for function in functions}
        stale = CannotArmor(f"{self.filename} is not what runs: it was edited since it was imported")
        try:
            unknown = alive - {codes.before for codes in self.functions()}
        except SyntaxError:
            raise stale from None
        # A compiler's own functions, for what follows a graph break, bear the file's name too.
        if any(patched.line in _lines(code) and "torch_dynamo" not in code.co_name for code in unknown):
            raise stale
        guilty = [
            codes
            for codes in self.functions([patched], functions[0].__globals__)
            if codes.before.co_flags & inspect.CO_OPTIMIZED  # a class body is no function
            and any(name.startswith(PREFIX) for name in codes.after.co_names)  # itself, and not only one within it
        ]
        where = f"line {patched.line}"
        if not guilty:
            raise CannotArmor(f"{where} of {self.filename} is in no function, so it has run or is running")
        running = set(map(_original, _running()))
        for codes in guilty:
            name = codes.before.co_qualname
            if codes.before in running:
                raise CannotArmor(f"{name} is running and keeps its code: move {where} into a function of its own")
            if codes.before not in alive and not (alive & set(codes.around)) - running:
                raise CannotArmor(f"{name} is not alive, and no function that creates it can be changed")
        return patched


# Of the process, as functions are, whichever Armor patched them.
_SOURCES: dict[str, _Source] = {}  # by file name: those with patches
_ORIGINALS: dict[CodeType, CodeType] = {}  # of all code that was ever installed


def is_patched(file: str, line: int, op: str) -> bool:
    """Say whether an operation is patched, by itself or with all of its line; the file as its code names it."""
    patches = _SOURCES[file].patches if file in _SOURCES else []
    return any(one.line == line and one.op in (op, "") for one in patches)


def _original(code: CodeType) -> CodeType:
    return _ORIGINALS.get(code, code)


def _pairs(before: CodeType, after: CodeType, around: tuple[CodeType, ...]) -> Iterator[_Codes]:
    inner = _inner(before), _inner(after)
    if len(inner[0]) != len(inner[1]) or before.co_freevars != after.co_freevars:
        raise CannotArmor(f"{before.co_qualname} would not stay the same function")
    if before.co_name != "<module>":
        yield _Codes(before, after, around)
        around = (*around, before)
    for old, new in zip(*inner, strict=True):
        yield from _pairs(old, new, around)


def _inner(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]


def _found(file: str) -> tuple[list[FunctionType], _Source]:
    """Return all live functions of a file, and their source: where some are patched, the text that was read then."""
    functions = _live_functions(file)
    if not functions:
        raise CannotArmor(f"no live function comes from {file}")
    filename = functions[0].__code__.co_filename
    if filename in _SOURCES:
        return functions, _SOURCES[filename]
    linecache.checkcache(filename)
    lines = linecache.getlines(filename, functions[0].__globals__)
    if not lines:
        raise CannotArmor(f"there is no source of {filename}: code made by exec, or moved since, stays as it is")
    return functions, _Source(filename, "".join(lines))


def _live_functions(file: str) -> list[FunctionType]:
    real = Path(file).resolve()

    @cache
    def is_from(name: str) -> bool:
        return name == file or (name.endswith(real.name) and Path(name).resolve() == real)

    functions = (thing for thing in gc.get_objects() if type(thing) is FunctionType)  # runs no code of the objects
    codes = ((function, function.__code__) for function in functions)
    return [function for function, code in codes if code.co_name != "<module>" and is_from(code.co_filename)]


def _lines(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}.union(*map(_lines, _inner(code)))


def _running() -> Iterator[CodeType]:
    """The code of all calls that have begun and not ended, in all threads."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield frame.f_code
            frame = frame.f_back
