"""Extensions: each can be deleted. What is in core cannot know them (test_house.py): loops are guarded here without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import resilient_train
from resilient_train.extensions import DEFAULT

ROOT = Path(__file__).parents[2]
PACKAGE = Path(resilient_train.__file__).parent
NAMES = [place.partition(":")[0].partition(".")[0] for place in DEFAULT]
KINDS = {place.partition(":")[0].partition(".")[0]: place.partition(":")[2] for place in DEFAULT}

# The function and the verb that examine a batch: without the extension they say what is missing.
SHOWN = {"diagnosis": {"__init__.py", "command/examine.py"}}


def without(names: list[str], folder: Path) -> Path:
    """Copy the package, its configuration and the tests of the core, without some extensions.

    All copies have the same place in turn, so that Python compiles only once what they have in common.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("resilient_train", "conf", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    home = folder / "resilient_train" / "extensions"
    listed = home / "__init__.py"
    text = listed.read_text(encoding="utf-8")
    for name in names:
        shutil.rmtree(home / name, ignore_errors=True)
        (home / f"{name}.py").unlink(missing_ok=True)
        text = re.sub(rf'    "{name}[.:][^\n]*\n', "", text)
    listed.write_text(text, encoding="utf-8")
    return folder


DELETED = [
    *(pytest.param([name], "each_kind", id=name) for name in NAMES),
    *(pytest.param([name], "not long", id=f"{name}, all tests", marks=pytest.mark.long) for name in NAMES),
    pytest.param(NAMES, "not long", id="all"),
]


@pytest.mark.parametrize(("names", "which"), DELETED)
def test_the_core_stands_without_it(names: list[str], which: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without one, a scenario of each kind passes, in the long form all of `tests/core`; without any, all of these."""
    folder = without(names, tmp_path_factory.getbasetemp() / "copy")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", which, "tests/core"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", NAMES)
def test_nobody_else_knows_it(name: str) -> None:
    """Neither its module nor its class is named outside of it, but in the list."""
    home = PACKAGE / "extensions"
    own = [*(home / name).rglob("*.py"), home / f"{name}.py", home / "__init__.py"]
    named = re.compile(rf"extensions[./]{name}\b|\b{KINDS[name]}\b")
    knowing = [file for file in PACKAGE.rglob("*.py") if file not in own and named.search(file.read_text())]
    assert {str(file.relative_to(PACKAGE)) for file in knowing} == SHOWN.get(name, set())
