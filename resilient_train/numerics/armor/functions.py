"""Functions that are alive get new code, compiled from the same source with seams in it.

The source has to be what runs: compiled as it stands it must give the code that is running, to the last instruction.
Line numbers, names and closures stay what they were, so callers, tracebacks, decorators and hooks notice nothing.
"""

from __future__ import annotations
import __future__

import ast
import gc
import inspect
import linecache
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from types import CodeType, FrameType, FunctionType, GeneratorType

import torch

from resilient_train.numerics.armor.errors import CannotArmor
from resilient_train.numerics.armor.seams import PREFIX, Seam, sew, stand_in
from resilient_train.secrets import MASK, masked

_FUTURE = reduce(or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))


@dataclass(frozen=True, slots=True)
class Pair:
    """The code of a function before and after, with that of the functions around it, outermost first."""

    before: CodeType
    after: CodeType
    around: tuple[CodeType, ...]

    @property
    def has_seam(self) -> bool:
        """Say whether it changed itself, and not only a function within it."""
        return any(name.startswith(PREFIX) for name in self.after.co_names)


@dataclass(slots=True)
class Source:
    """A file whose functions are alive, and what they wear."""

    filename: str  # as its code has it
    text: str
    flags: int
    seams: list[Seam] = field(default_factory=list)  # one that is asked for twice is there twice

    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.filename)

    def compiled(self, tree: ast.Module) -> CodeType:
        # As the running code was: the flags of this file here are none of its business.
        return compile(tree, self.filename, "exec", flags=self.flags, dont_inherit=True)  # type: ignore[no-any-return]

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    def lines_with(self, function: str, text: str) -> list[int]:
        """Return the numbers of the lines that read so, in the function of that qualified name."""
        whole = self.compiled(self.tree())
        own = [pair.before for pair in _pairs(whole, whole, ()) if pair.before.co_qualname == function]
        spans = [range(code.co_firstlineno, max(_lines(code)) + 1) for code in own]
        return [
            number
            for number, line in enumerate(self.lines, start=1)
            if _reads(line.strip(), text) and any(number in span for span in spans)
        ]

    def pairs(self, seams: Sequence[Seam], functions: Sequence[FunctionType]) -> list[Pair]:
        """Return the code that seams change. What a module or a class computes while it is made is not among it."""
        tree = self.tree()
        sew(tree, set(seams), functions[0].__globals__)
        changed = _pairs(self.compiled(self.tree()), self.compiled(tree), ())
        return [pair for pair in changed if pair.before != pair.after]

    def dress(self, functions: Sequence[FunctionType]) -> None:
        """Give all functions the code that the seams ask for, and the old code if none do."""
        pairs = self.pairs(self.seams, functions) if self.seams else []
        new = {pair.before: pair.after for pair in pairs}
        _WORN.update({pair.after: pair.before for pair in pairs})
        names = {name for pair in pairs for name in pair.after.co_names if name.startswith(PREFIX)}
        for function in functions:
            function.__globals__.update({name: stand_in(name) for name in names - function.__globals__.keys()})
            bare = _bare(function.__code__)
            if bare in new:
                _WORN[new[bare]] = bare  # the very code it had, not one like it
            if function.__code__ is not new.get(bare, bare):
                function.__code__ = new.get(bare, bare)
        if "torch._dynamo" in sys.modules:  # what was compiled has the old code in it
            torch.compiler.reset()


def _pairs(before: CodeType, after: CodeType, around: tuple[CodeType, ...]) -> Iterator[Pair]:
    inner = [[part for part in code.co_consts if isinstance(part, CodeType)] for code in (before, after)]
    if [part.co_qualname for part in inner[0]] != [part.co_qualname for part in inner[1]]:
        raise CannotArmor(f"the functions in {before.co_qualname} cannot be told apart")
    if before.co_freevars != after.co_freevars:
        raise CannotArmor(f"{before.co_qualname} would close over other variables")
    if before.co_name != "<module>":
        yield Pair(before, after, around)
        around = (*around, before)
    for old, new in zip(*inner, strict=True):
        yield from _pairs(old, new, around)


# Both are the process's, as functions are, whoever asks for their armor.
_SOURCES: dict[str, Source] = {}  # by file name: those with seams
_WORN: dict[CodeType, CodeType] = {}  # all code that was ever put on, and what it is made from


def _bare(code: CodeType) -> CodeType:
    return _WORN.get(code, code)


def put_on(file: str, seam: Seam) -> tuple[Source, str]:
    """Armor a line; return the source it is in, and the name of the function. Nothing has changed if this raises."""
    functions = functions_of(file)
    source = source_of(functions)
    name = _checked(source, seam, functions)
    _SOURCES[source.filename] = source
    source.seams.append(seam)
    source.dress(functions)
    return source, name


def check(file: str, seam: Seam) -> None:
    """Raise what putting it on would raise."""
    functions = functions_of(file)
    _checked(source_of(functions), seam, functions)


def take_off(file: str, seams: Sequence[Seam]) -> None:
    """Take armor off; where somebody else has put on the same, it stays."""
    functions = _alive(file)
    for name in {function.__code__.co_filename for function in functions} & _SOURCES.keys():
        source = _SOURCES[name]
        for seam in seams:
            source.seams.remove(seam)
        source.dress(functions)
        if not source.seams:
            del _SOURCES[name]


def functions_of(file: str) -> list[FunctionType]:
    """Return all functions that are alive and come from a file."""
    found = _alive(file)
    if not found:
        hidden = ", unless gc.freeze() hid it" if gc.get_freeze_count() else ""
        raise CannotArmor(f"no function that is alive comes from {file}{hidden}")
    return found


def _alive(file: str) -> list[FunctionType]:
    is_from = _SameFile(file)
    functions = (thing for thing in gc.get_objects() if type(thing) is FunctionType)  # asks nobody else what it is
    codes = ((function, function.__code__) for function in functions)
    return [function for function, code in codes if code.co_name != "<module>" and is_from(code.co_filename)]


def _reads(line: str, text: str) -> bool:
    """Say whether a line reads so, also where the text comes out of a file, without its secrets."""
    return line == text or (MASK in text and masked(line) == text)


class _SameFile:
    """Tells whether the name of a file is another one's."""

    def __init__(self, file: str) -> None:
        self.file, self.real = file, Path(file).resolve()
        self.known = {file: True}

    def __call__(self, name: str) -> bool:
        if name not in self.known:
            is_same = name.endswith(self.real.name) and Path(name).resolve() == self.real
            self.known[name] = is_same or (MASK in self.file and masked(name) == self.file)
        return self.known[name]


def source_of(functions: Sequence[FunctionType]) -> Source:
    """Return the source that functions of a file come from: if some wear armor, the text that was read then."""
    filename = functions[0].__code__.co_filename
    if filename in _SOURCES:
        return _SOURCES[filename]
    linecache.checkcache(filename)
    lines = linecache.getlines(filename, functions[0].__globals__)
    if not lines:
        raise CannotArmor(f"there is no source of {filename}: what was made by exec, or moved since, stays as it is")
    flags = reduce(or_, (function.__code__.co_flags for function in functions)) & _FUTURE
    return Source(filename, "".join(lines), flags)


def _checked(source: Source, seam: Seam, functions: Sequence[FunctionType]) -> str:
    """Return the name of the function that a seam is in; raise if the seam would not hold."""
    alive = {_bare(function.__code__) for function in functions}
    if _is_stale(source, seam.line, alive):
        raise CannotArmor(f"{source.filename} is not what runs: it was edited since it was imported, or changed while")
    guilty = [pair for pair in source.pairs([seam], functions) if pair.has_seam and _is_function(pair.before)]
    if not guilty:
        raise CannotArmor(f"line {seam.line} of {source.filename} is in no function, so it has run or is running")
    running = set(map(_bare, _running(guilty)))
    for pair in guilty:
        name = pair.before.co_qualname
        if pair.before in running:
            raise CannotArmor(
                f"{name} is running, and goes on as it is: move line {seam.line} into a function of its own"
            )
        if pair.before not in alive and not (alive & set(pair.around)) - running:
            raise CannotArmor(f"{name} is not alive and nothing that makes it anew can be changed")
    return guilty[0].before.co_qualname


def _is_stale(source: Source, line: int, alive: set[CodeType]) -> bool:
    """Say whether a function that the line is in is not what its source says."""
    try:
        compiled = source.compiled(source.tree())
    except SyntaxError:
        return True
    known = {pair.before for pair in _pairs(compiled, compiled, ())}
    # A compiler's own functions, for what follows a graph break, bear the file's name too.
    return any(line in _lines(code) and "torch_dynamo" not in code.co_name for code in alive - known)


def _lines(code: CodeType) -> set[int]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return {line for _, _, line in code.co_lines() if line is not None}.union(*map(_lines, inner))


def _is_function(code: CodeType) -> bool:
    """Say no of what a class computes while it is made."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _running(pairs: Sequence[Pair]) -> Iterator[CodeType]:
    """The code of all calls that have begun and not ended, in all threads, and of generators if any of these are."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield frame.f_code
            frame = frame.f_back
    if any(pair.before.co_flags & inspect.CO_GENERATOR for pair in pairs):
        yield from (thing.gi_code for thing in gc.get_objects() if type(thing) is GeneratorType and thing.gi_frame)
