"""`make test TORCH=...` tests with another torch, in an environment of its own; one that is there stays."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(where: Path, *command: str, status: int = 0) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TORCH"))}
    done = subprocess.run(command, cwd=where, env=kept, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def asked(where: Path, *arguments: str) -> str | None:
    """The release of torch that `make` would install."""
    said = run(where, "make", "--dry-run", *arguments)
    files = [(where / name).read_text() for name in re.findall(r" -r (\S+)", said)]
    found = re.search(r"(?:^| )torch==(\S+)", "\n".join([said, *files]), re.MULTILINE)
    return found and found[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh one, on a machine without a GPU."""
    if shutil.which("nvidia-smi"):
        pytest.skip("with a GPU a fresh environment gets the newest torch")
    place = tmp_path / "checkout"
    place.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "tests" / "releases", place / "tests" / "releases")
    return place


def test_the_oldest_is_the_floor_of_the_package() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (floor,) = (need.removeprefix("torch>=") for need in needs if need.startswith("torch>="))
    assert asked(ROOT, "test", "TORCH=oldest", "VENV=none") == f"{floor}.0"


def test_a_named_torch_has_an_environment_of_its_own(checkout: Path) -> None:
    said = run(checkout, "make", "--dry-run", "test", "TORCH=2.12.1")
    assert "torch==2.12.1" in said and ".venv-2.12.1/bin/python -m pytest" in said and ".venv/" not in said
    said = run(checkout, "make", "test", "TORCH=older", status=2)
    assert "TORCH=older must be oldest, newest or a release such as" in said


@pytest.mark.parametrize("name", ["oldest", "newest"])
def test_the_oldest_and_the_newest_come_with_what_else_they_need(checkout: Path, name: str) -> None:
    file = f"tests/releases/requirements-{name}.txt"
    release = asked(checkout, "test", f"TORCH={name}")
    for spelled in (name, release):
        said = run(checkout, "make", "--dry-run", "test", f"TORCH={spelled}")
        assert f" -r {file}" in said and f".venv-{release}/bin/python -m pytest" in said


def test_an_environment_that_is_there_stays(checkout: Path) -> None:
    assert asked(checkout, "test") == asked(checkout, "demo") is not None
    (checkout / ".venv" / "bin").mkdir(parents=True)
    for name in ("bin/python", ".installed", ".installed-test"):
        (checkout / ".venv" / name).touch()
    assert "pip install" not in run(checkout, "make", "--dry-run", "test")
