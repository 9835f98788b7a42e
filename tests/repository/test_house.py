"""The house: who may know whom."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import resilient_train

HOUSE = Path(resilient_train.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
CORE = sorted((HOUSE / "core").rglob("*.py"))

# The rooms, from the ground up, which every room may know: each may know those it names, nothing else.
KNOWN = {
    # The story of a run.
    "core": "",
    # What it is about: processes, data, the disk; and what a run is made of.
    "processes": "core",
    "data": "core processes",
    "durable": "core data processes",
    "parts": "core data durable processes",
    # Capabilities: each knows no other one.
    "extensions": "core data durable parts processes",
    # What is around it.
    "zoo": "",
    "report": "durable",
    "loop": "core data durable extensions parts processes report",
    "trainers": "core data loop parts",
    "command": "core data durable extensions loop parts processes report",
    "__main__": "command processes",
    "__init__": "extensions loop processes trainers",
}
MAY_KNOW = {"ground": set[str]()} | {name: set(known.split()) for name, known in KNOWN.items()}
AROUND = {"zoo", "report", "loop", "trainers", "command", "__main__", "__init__"}

LIMITS = Path(__file__).with_name("limits.txt")
TESTS = sorted(Path(__file__).parents[1].rglob("*.py"))
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

# Parts of a run: only they themselves may set their attributes.
WIRED = (
    *("self._recovery", "self._keeper", "self._controls", "self._examination", "self._parts"),
    *("self.recovery", "self.keeper", "self.controls", "guard", "run.guard", "examination", "recovery"),
)

# Libraries that only some may know.
KNOWN_TO = {
    "hydra": {"command/config", "command/command"},
    "omegaconf": {"command/config", "command/command"},
    "mlflow": {"report"},
    "accelerate": {"processes", "loop", "trainers", "command"},
    "transformers": {"zoo"},
    "datasets": {"zoo"},
    "lightning": {"trainers"},
    "sklearn": {"zoo"},
}
WITHOUT_TORCH = {
    *(f"ground/{name}.py" for name in ("errors", "files", "reader", "secrets", "sentences", "types", "wording")),
    # Answered at once.
    *("command/checkpoints", "command/command", "command/config/", "command/incidents", "command/status"),
    *("report", "processes/process_exit.py", "data/history.py"),
    *(f"durable/{name}.py" for name in ("endings", "incident_log", "journal", "lock", "manifest", "progress")),
    "durable/run_history.py",
    *(f"core/{name}.py" for name in ("checks", "decide", "episode", "knobs", "limit", "loss", "policy", "remedies")),
    *(f"extensions/{name}" for name in ("diagnosis/verdict.py", "scans/weights.py", "trials/arithmetic.py")),
}


def room(file: Path) -> str:
    return file.relative_to(HOUSE).parts[0].removesuffix(".py")


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(HOUSE)))
def test_a_file_keeps_to_the_house(file: Path) -> None:
    """Rooms that its verb needs, libraries of its room, and no object that is wired from outside later."""
    text, here, place = file.read_text(encoding="utf-8"), room(file), str(file.relative_to(HOUSE))
    tree = ast.parse(text)
    parts = [name.split(".") for name in imported(tree)]
    rooms = {name[1] for name in parts if name[0] == "resilient_train" and name[1:] and not name[1].startswith("__")}
    unwanted = rooms - MAY_KNOW[here] - {"ground", here}
    assert not unwanted, f"{here} should not know {', '.join(sorted(unwanted))}"
    if here == "extensions" and place != "extensions/__init__.py":
        own = file.relative_to(HOUSE).parts[1].removesuffix(".py")
        others = {name[2] for name in parts if name[:2] == ["resilient_train", "extensions"]} - {
            own,
            "Extension",
            "Sink",
        }
        assert not others, f"{own} should not know {', '.join(sorted(others))}"
    for library in {name[0] for name in parts} & KNOWN_TO.keys():
        assert here in KNOWN_TO[library] or place.startswith(tuple(KNOWN_TO[library])), f"{place} knows {library}"
    assert "torch" not in {name[0] for name in parts} or not place.startswith(tuple(WITHOUT_TORCH))
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            is_wired = isinstance(target, ast.Attribute) and ast.unparse(target.value) in WIRED
            assert not is_wired, f"{place}:{target.lineno}: {ast.unparse(target)} is set from outside"


def above_limits(found: dict[str, int]) -> dict[str, int]:
    """Return the sizes that are larger than limits.txt allows."""
    return {name: size for name, size in found.items() if size > limit_of(name)}


def limit_of(name: str) -> int:
    rows = (line.rsplit(maxsplit=1) for line in LIMITS.read_text().splitlines() if not line.startswith("#"))
    return int(dict(rows)[name])


def lines_in(files: Iterable[Path]) -> int:
    """Count physical lines, blank ones and docstrings included."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def tokens_in(files: Iterable[Path]) -> int:
    """Count tokens of code, without comments and docstrings; an f-string also counts what it holds."""
    described, count = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef), 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        docs = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FormattedValue):
                count += len(words_of(ast.unparse(node.value)))
            elif isinstance(node, described) and isinstance(first := node.body[0] if node.body else None, ast.Expr):
                is_text = isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
                docs |= {*range(first.lineno, (first.end_lineno or 0) + 1)} if is_text else set()
        count += sum(one.type != tokenize.STRING or one.start[0] not in docs for one in words_of(text))
    return count


def words_of(code: str) -> list[tokenize.TokenInfo]:
    return [one for one in tokenize.generate_tokens(io.StringIO(code).readline) if one.type not in _NO_CODE]


def test_the_house_does_not_grow() -> None:
    """No more lines and files than limits.txt says, whose figures may only fall. README has those of the package."""
    found = {"lines of the package": lines_in(FILES), "files of the package": len(FILES)}
    more = {"lines of the core": lines_in(CORE), "lines of the tests": lines_in(TESTS)}
    assert above_limits(found | more) == {}
    said = " ".join((HOUSE.parent / "README.md").read_text(encoding="utf-8").split())
    most, files = map(limit_of, found)
    assert f"at most {most:,} lines in {files} files" in said


def test_lines_are_not_packed() -> None:
    """No more tokens of code than limits.txt says, whose figures may only fall."""
    found = {"tokens of the package": tokens_in(FILES), "tokens of the core": tokens_in(CORE)}
    assert above_limits(found | {"tokens of the tests": tokens_in(TESTS)}) == {}


def test_the_engine_knows_nothing_around_it() -> None:
    """Whoever embeds it needs no command, no tracker and no adapter; its core can be read with the ground alone."""
    assert not MAY_KNOW["core"]
    assert not {room for name, rooms in MAY_KNOW.items() if name not in AROUND for room in rooms & AROUND}


def test_there_are_no_circles() -> None:
    """The table above can be put in an order in which every room knows earlier ones only."""
    left = {name: set(known) for name, known in MAY_KNOW.items()}
    while left:
        free = {name for name, known in left.items() if not known & left.keys()}
        assert free, f"a circle among {', '.join(sorted(left))}"
        left = {name: known for name, known in left.items() if name not in free}
