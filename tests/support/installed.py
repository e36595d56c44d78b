"""Sidestream as pip installs it: a wheel in an environment of its own, which sees no checkout and no network.

The environment's other packages are those of the environment that runs the tests, but only the ones that
`pip install sidestream` would bring. What needs another one asks for it by name (`Installed.run(more=...)`).
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Installed:
    """An environment: `home` holds bin/python and bin/sidestream, `others` links to packages that are not required."""

    home: Path
    others: Path

    def run(
        self, *command: str, cwd: Path, more: bool = False, timeout: float = 1200, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command, the environment's `bin` first in its PATH. `more`: with every package that the tests have."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.variables(more) | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def variables(self, more: bool = False) -> dict[str, str]:
        """The environment variables of a user who has activated the environment."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV", "PYTEST"))}
        path = {"PATH": f"{self.home / 'bin'}{os.pathsep}{kept['PATH']}", "VIRTUAL_ENV": str(self.home)}
        return kept | path | ({"PYTHONPATH": str(self.others)} if more else {})


def pip(*arguments: str, cwd: Path) -> None:
    """Runs pip, which must succeed."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def copy_of_sources(directory: Path) -> Path:
    """A copy of what git tracks or would track, so that building leaves nothing in the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = (
        listed.stdout.splitlines()
        if listed.returncode == 0
        else [
            name
            for name in (str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())
            if not name.startswith(".venv")
        ]
    )
    for name in names:
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes((ROOT / name).read_bytes())
    return directory


def required(name: str, extra: str = "") -> set[str]:
    """The distributions that pip would bring for `name`, those of `name` included."""
    found: set[str] = set()
    waiting = [(name, extra)]
    while waiting:
        name, extra = waiting.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in found:
            continue
        try:
            requires = metadata.distribution(name).requires or ()
        except metadata.PackageNotFoundError:
            continue  # of another platform, or of an extra that is not installed
        found.add(name)
        for text in requires:
            each = Requirement(text)
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                waiting.append((each.name, ""))
    return found


def link_packages(names: Iterable[str], directory: Path) -> Path:
    """Makes a directory in which exactly the distributions `names` are importable."""
    directory.mkdir(parents=True)
    for name in names:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (directory / top).exists() and not top.endswith(".pth"):
                (directory / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return directory


def make_wheel(directory: Path) -> None:
    """Builds the wheel from a copy of the sources into `directory`."""
    sources = copy_of_sources(directory / "sources")
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(directory), ".", cwd=sources)


def make_environment(directory: Path, wheel: Path) -> None:
    """An environment in `directory` with the wheel and links to what it requires."""
    venv.create(directory / "venv", with_pip=False)
    python = directory / "venv" / "bin" / "python"
    pip("--python", str(python), "install", "--no-index", "--no-deps", "--quiet", str(wheel), cwd=directory)
    needed = required("sidestream") - {"sidestream"}
    link_packages(needed, directory / "required")
    everything = {re.sub(r"[-_.]+", "-", each.name).lower() for each in metadata.distributions()}
    link_packages(everything - needed - {"sidestream"}, directory / "others")
    (packages,) = (directory / "venv").glob("lib/python*/site-packages")
    (packages / "required.pth").write_text(f"{directory / 'required'}\n")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The directory `name` that `make` fills, once in a run, however many processes the run has."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    place = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            (place / "done").touch()
    return place


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel; `sources` next to it are what it was built from."""
    (built,) = once(tmp_path_factory, "wheel", make_wheel).glob("sidestream-*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The environment that the wheel is installed in."""
    place = once(tmp_path_factory, "installed", lambda directory: make_environment(directory, wheel))
    return Installed(place / "venv", place / "others")
