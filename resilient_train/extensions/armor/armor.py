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
from pathlib import Path
from types import CodeType, FrameType, FunctionType, GeneratorType
from typing import Any, NamedTuple

import torch

from resilient_train.extensions.armor.ast_patch import PREFIX, CannotArmor, LineChanged, Target, patch, replacement
from resilient_train.ground.secrets import MASK, masked

__all__ = ["Armor", "CannotArmor", "LineChanged", "PatchedLine", "is_patched"]


@dataclass(frozen=True, slots=True)
class PatchedLine:
    """One patched operation. Found again by file, function, text and count, since people edit between resumes."""

    file: str
    function: str  # its qualified name
    text: str  # of the line, stripped
    count: int  # of the lines with that text in the function, this is the one: from 0
    line: int
    op: str  # as torch names the function


@dataclass(slots=True)
class Armor:
    """Patches operations in the user's own code. Wherever nothing breaks, the code computes the same as before.

    Compiled code is compiled again at its next call. Earlier processes, such as data workers, keep their code.
    """

    lines: list[PatchedLine] = field(default_factory=list)

    def add(self, file: str, line: int, op: str) -> PatchedLine:
        """Patch an operation, or with an empty `op` all of a line. Nothing has changed if this raises CannotArmor."""
        for known in self.lines:
            if (known.file, known.line, known.op) == (file, line, op):
                return known
        (functions, source), target = _found(file), Target(line, op)
        function = source.checked(target, functions)
        _SOURCES[source.filename] = source
        source.targets.append(target)
        source.install(functions)
        text = source.text.split("\n")[line - 1].strip()
        patched = PatchedLine(file, function, text, source.lines_with(function, text).index(line), line, op)
        self.lines.append(patched)
        return patched

    def check(self, file: str, line: int, op: str) -> None:
        """Raise CannotArmor if `add` would; nothing changes, and nothing is compiled again."""
        functions, source = _found(file)
        source.checked(Target(line, op), functions)

    def add_again(self, patched: PatchedLine) -> PatchedLine:
        """Patch what an earlier process had patched, wherever its line is by now."""
        _, source = _found(patched.file)
        lines = source.lines_with(patched.function, patched.text)
        if patched.count >= len(lines):
            raise LineChanged(f"{patched.function} in {patched.file} has no such line any more: {patched.text}")
        return self.add(source.filename, lines[patched.count], patched.op)

    def remove(self) -> None:
        """Remove all patches. What another Armor has patched as well stays patched."""
        for file in {one.file for one in self.lines}:
            functions = _live_functions(file)
            for name in {function.__code__.co_filename for function in functions} & _SOURCES.keys():
                source = _SOURCES[name]
                for one in self.lines:
                    if one.file == file:
                        source.targets.remove(Target(one.line, one.op))
                source.install(functions)
                if not source.targets:
                    del _SOURCES[name]
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
    targets: list[Target] = field(default_factory=list)  # one that two Armors patched is there twice

    def functions(self, targets: Collection[Target] = (), names: dict[str, Any] | None = None) -> list[_Codes]:
        """Return the code of all functions, before and after; not what a module or a class computes at import."""
        trees = ast.parse(self.text, self.filename), ast.parse(self.text, self.filename)
        patch(trees[1], set(targets), names or {})
        before, after = (compile(tree, self.filename, "exec", dont_inherit=True) for tree in trees)
        return list(_pairs(before, after, ()))

    def lines_with(self, function: str, text: str) -> list[int]:
        own = [codes.before for codes in self.functions() if codes.before.co_qualname == function]
        spans = [range(code.co_firstlineno, max(_lines(code)) + 1) for code in own]
        return [
            number
            for number, line in enumerate(map(str.strip, self.text.split("\n")), start=1)
            if line == text and any(number in span for span in spans)
        ]

    def install(self, functions: Sequence[FunctionType]) -> None:
        """Give all functions the code with all targets patched, and the original code if there are none."""
        codes = self.functions(self.targets, functions[0].__globals__) if self.targets else []
        new = {before: after for before, after, _ in codes if before != after}
        for before, after in new.items():
            _ORIGINALS.setdefault(after, before)
        names = {name for after in new.values() for name in after.co_names if name.startswith(PREFIX)}
        for function in functions:
            function.__globals__.update({name: replacement(name) for name in names - function.__globals__.keys()})
            original = _original(function.__code__)
            if original in new:
                _ORIGINALS[new[original]] = original  # the very code it had, not an equal one
            if function.__code__ is not new.get(original, original):
                function.__code__ = new.get(original, original)
        compiler = sys.modules.get("torch._dynamo.convert_frame")
        if getattr(compiler, "FRAME_COUNTER", compiler is not None):  # compiled code contains the old code
            torch.compiler.reset()  # where nothing is compiled, that only imports Inductor for CUDA: seconds

    def checked(self, target: Target, functions: Sequence[FunctionType]) -> str:
        """Return the name of the function that a target is in; raise CannotArmor if it cannot be patched."""
        alive = {_original(function.__code__) for function in functions}
        stale = CannotArmor(f"{self.filename} is not what runs: it was edited since it was imported")
        try:
            unknown = alive - {codes.before for codes in self.functions()}
        except SyntaxError:
            raise stale from None
        # A compiler's own functions, for what follows a graph break, bear the file's name too.
        if any(target.line in _lines(code) and "torch_dynamo" not in code.co_name for code in unknown):
            raise stale
        guilty = [
            codes
            for codes in self.functions([target], functions[0].__globals__)
            if codes.before.co_flags & inspect.CO_OPTIMIZED  # a class body is no function
            and any(name.startswith(PREFIX) for name in codes.after.co_names)  # itself, and not only one within it
        ]
        if not guilty:
            raise CannotArmor(f"line {target.line} of {self.filename} is in no function, so it has run or is running")
        running = set(map(_original, _running(guilty)))
        for codes in guilty:
            name = codes.before.co_qualname
            if codes.before in running:
                raise CannotArmor(
                    f"{name} is running and keeps its code: move line {target.line} into a function of its own"
                )
            if codes.before not in alive and not (alive & set(codes.around)) - running:
                raise CannotArmor(f"{name} is not alive, and no function that creates it can be changed")
        return guilty[0].before.co_qualname


# Of the process, as functions are, whichever Armor patched them.
_SOURCES: dict[str, _Source] = {}  # by file name: those with targets
_ORIGINALS: dict[CodeType, CodeType] = {}  # of all code that was ever installed


def is_patched(file: str, line: int, op: str) -> bool:
    """Say whether an operation is patched, by itself or with all of its line; the file as its code names it."""
    targets = _SOURCES[file].targets if file in _SOURCES else []
    return any(target.line == line and target.op in (op, "") for target in targets)


def _original(code: CodeType) -> CodeType:
    return _ORIGINALS.get(code, code)


def _pairs(before: CodeType, after: CodeType, around: tuple[CodeType, ...]) -> Iterator[_Codes]:
    inner = [[part for part in code.co_consts if isinstance(part, CodeType)] for code in (before, after)]
    if [part.co_qualname for part in inner[0]] != [part.co_qualname for part in inner[1]]:
        raise CannotArmor(f"the functions in {before.co_qualname} cannot be told apart")
    if before.co_freevars != after.co_freevars:
        raise CannotArmor(f"{before.co_qualname} would close over other variables")
    if before.co_name != "<module>":
        yield _Codes(before, after, around)
        around = (*around, before)
    for old, new in zip(*inner, strict=True):
        yield from _pairs(old, new, around)


def _found(file: str) -> tuple[list[FunctionType], _Source]:
    """Return all live functions of a file, and their source: where some are patched, the text that was read then."""
    functions = _live_functions(file)
    if not functions:
        hidden = ", unless gc.freeze() hid it" if gc.get_freeze_count() else ""
        raise CannotArmor(f"no live function comes from {file}{hidden}")
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
    known = {file: True}

    def is_from(name: str) -> bool:
        if name not in known:
            is_same = name.endswith(real.name) and Path(name).resolve() == real
            known[name] = is_same or (MASK in file and masked(name) == file)
        return known[name]

    functions = (thing for thing in gc.get_objects() if type(thing) is FunctionType)  # runs no code of the objects
    codes = ((function, function.__code__) for function in functions)
    return [function for function, code in codes if code.co_name != "<module>" and is_from(code.co_filename)]


def _lines(code: CodeType) -> set[int]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return {line for _, _, line in code.co_lines() if line is not None}.union(*map(_lines, inner))


def _running(guilty: Sequence[_Codes]) -> Iterator[CodeType]:
    """The code of all calls that have begun and not ended, in all threads, and of generators if any of these are."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield frame.f_code
            frame = frame.f_back
    if any(codes.before.co_flags & inspect.CO_GENERATOR for codes in guilty):
        yield from (thing.gi_code for thing in gc.get_objects() if type(thing) is GeneratorType and thing.gi_frame)
