"""Folders of the package: each has a map of its files, and not too many of them. `make lint` checks the imports."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEVELS = ("ops", "graphs", "compiler", "runtime", "tools")
PACKAGES = [path.parent for level in LEVELS for path in sorted((ROOT / level).rglob("__init__.py"))]
MAX_FILES = 20
LARGE_FOLDERS: tuple[str, ...] = ()


def test_every_folder_has_a_map_of_its_files() -> None:
    """A folder's `__init__` names each of its modules and folders."""
    missing = []
    for package in PACKAGES:
        files = {each.stem for each in package.glob("*.py") if not each.name.startswith("__")}
        folders = {each.parent.name for each in package.glob("*/__init__.py")}
        docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
        words = set(re.findall(r"\w+", docstring))
        missing += [f"{package.relative_to(ROOT)}: {name}" for name in sorted((files | folders) - words)]
    assert missing == []


def test_no_folder_has_too_many_files() -> None:
    counts = {package.relative_to(ROOT).as_posix(): len(list(package.glob("*.py"))) for package in PACKAGES}
    crowded = {name: count for name, count in counts.items() if count > MAX_FILES and name not in LARGE_FOLDERS}
    assert crowded == {}
