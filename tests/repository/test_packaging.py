"""What a stranger gets: the wheel, and the scripts that take a fresh machine to a run and to a tested package."""

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    file for file in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"] if file.suffix not in (".yaml", ".py")
)


def printed_by(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    return subprocess.run(command, cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_the_wheel_holds_the_package_and_says_what_it_is(wheel: Path) -> None:
    """Every module and every configuration file of the checkout is in it, and nothing else; licence, Python versions,
    extras and the command are in the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    inside = {name for name in texts if ".dist-info/" not in name}
    code = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "resilient_train").rglob("*")
        if file.suffix in {".py", ".typed"}
    }
    assert inside == code | {f"resilient_train/{file.relative_to(ROOT)}" for file in (ROOT / "conf").rglob("*.yaml")}
    assert "resilient_train/conf/config.yaml" in inside
    (folder,) = {name.partition("/")[0] for name in texts.keys() - inside}
    metadata = email.message_from_string(texts[f"{folder}/METADATA"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {"app", "dev", "hf"}
    assert "Version 2.0, January 2004" in texts[f"{folder}/licenses/LICENSE"]
    assert "resilient-train = resilient_train.__main__:main" in texts[f"{folder}/entry_points.txt"]


def test_the_wheel_runs_from_anywhere(installed_wheel: Path, tmp_path: Path) -> None:
    """The command finds code and configuration without the checkout, in any directory, and explains it."""
    search = {"PYTHONPATH": str(installed_wheel), "PATH": f"{installed_wheel}/bin:{os.environ['PATH']}"}
    environment = {**os.environ, **search}
    told = printed_by(["resilient-train", "--help"], cwd=tmp_path, env=environment)
    for words in ("model: custom, gpt, hf_causal_lm, mlp, resnet", "experiment: demo", "--config-dir"):
        assert words in told
    program = "import resilient_train as r; print(r.__file__)"
    where = printed_by([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    assert Path(where.strip()).is_relative_to(installed_wheel)
    assert not list(tmp_path.iterdir())


GUARDED = """
import sys
import resilient_train
print({"torch", "lightning", "transformers"} & sys.modules.keys())
import torch
from resilient_train import Guard
from resilient_train.__main__ import main

def train(steps):
    model = torch.nn.Linear(4, 1)
    rows = [(torch.ones(4) * (float("nan") if at == 7 else 1.0), torch.ones(1)) for at in range(64)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    guard = Guard(None, model, optimizer, data=rows, batch_size=8, steps=steps, run_dir="run", disk=10, resume=True)
    for x, y in guard.batches():
        loss = (model(x) - y).square().mean()
        loss.backward()
        guard.update(loss)
    guard.close()

train(20)
train(30)
for words in ("status run", "incidents run", "checkpoints run", "model=mlp"):
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as ended:
        print("exit code", ended.code)
"""


def test_a_loop_and_the_verbs_need_no_extra(tmp_path: Path) -> None:
    """Without what the extra `app` brings a loop is guarded, reviewed and resumed; the command says what it lacks.

    Importing the package loads no large library, and incidents are reported on stderr, once, without set-up."""
    lacking = dict.fromkeys(["hydra", "omegaconf", "mlflow", "sklearn", "rich"])
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update({lacking})\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    program = [sys.executable, "-c", GUARDED]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("set()\n")
    for words in ("Recovered: 30 steps; 1 incident (1 data)", "row 7", "a resume would load step-00000030"):
        assert words in done.stdout
    assert re.findall("exit code (.*)", done.stdout) == ["0", "0", "0", "2"]
    assert done.stderr.count("the batch is not finite") == done.stderr.count("resilient_train: ! incident ") == 1
    assert done.stderr.endswith("error: this needs the package hydra: pip install 'resilient-train[app]'\n")


def test_scripts_are_sound() -> None:
    """Every script may be executed, stops at its first error, and is valid bash. CI is scripts/test --all."""
    assert (ROOT / ".ci/run").read_text().splitlines()[2:] == [
        'exec "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../scripts/test" --all'
    ]
    for script in SCRIPTS:
        assert os.access(script, os.X_OK)
        assert "\nset -euo pipefail\n" in script.read_text()
        subprocess.run(["bash", "-n", script], check=True)


def test_the_list_of_slow_tests_names_tests() -> None:
    """Nothing in it is left of a test that was renamed: that would be in the short suite."""
    assert [name for name in slow.listed() if not slow.is_there(name)] == []


# scripts/environment, with the real venv and pip, for a project so small that neither torch nor a network is needed

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny"
version = "1"
optional-dependencies = {dev = []}
"""

BACKEND = """
import zipfile

FILES = {
    "METADATA": "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\nProvides-Extra: dev\\n",
    "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "RECORD": "",
}

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/tiny-1-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            wheel.writestr("tiny-1.dist-info/" + name, text)
    return "tiny-1-py3-none-any.whl"
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with scripts/environment and a tiny project, at a path with spaces and behind a link."""
    root = tmp_path / "some where" / "a [repository]"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/environment", root / "scripts")
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "constraints").mkdir()
    (root / "constraints/cpu.txt").touch()
    (tmp_path / "a link").symlink_to(root)
    return tmp_path / "a link"


def set_up(repository: Path, *extras: str, **variables: str) -> tuple[int, str]:
    """The exit code of scripts/environment and what it says."""
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    command = [str(repository / "scripts/environment"), *extras]
    done = subprocess.run(command, cwd="/", env=environment, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


def test_an_environment_is_made_when_it_has_to_be(repository: Path) -> None:
    """Made once, and left alone until an ingredient changes."""
    code, said = set_up(repository)
    assert (code, said.count("Making .venv")) == (0, 1)
    with (repository / "pyproject.toml").open("a") as project:
        project.write("[tool.ruff]\n")
    assert set_up(repository) == (0, ""), "a lint rule is nothing to install"
    assert set_up(repository, "dev")[1].startswith("Adding")
    assert set_up(repository, "dev") == (0, "")
    assert set_up(repository) == (0, ""), "more than asked for will do"

    (repository / "constraints/cpu.txt").write_text("torch==1\n")
    (repository / "find").symlink_to("/bin/false")  # the first command of a making: its decision is all we want here
    code, words = set_up(repository, PATH=f"{repository}:{os.environ['PATH']}")
    assert (code, words.split()[0]) == (1, "Making")


def test_an_environment_of_another_is_left_alone(repository: Path) -> None:
    """One that holds packages of the user's own is refused and stays as it is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", repository / ".venv"], check=True)
    (site_packages,) = (repository / ".venv/lib").glob("python*/site-packages")
    (site_packages / "mine-1.dist-info").mkdir()
    (site_packages / "mine-1.dist-info/METADATA").write_text("Name: mine\nVersion: 1\n")
    code, said = set_up(repository)
    assert (code, said.count("\n")) == (1, 1)
    assert "holds packages that this script did not install" in said
    assert not (repository / ".venv/stamp").exists()
