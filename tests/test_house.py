"""The floors and rooms of the house: no import upward, no circle, no crowded folder."""

import ast
import re
from pathlib import Path

import pytest
from sidestream.tools.pages import house


@pytest.fixture(scope="module")
def ours() -> house.House:
    return house.read_house()


def test_no_import_looks_up(ours: house.House) -> None:
    assert ours.upward() == []


def test_no_modules_and_no_rooms_import_each_other(ours: house.House) -> None:
    found = [*ours.module_circles(), *ours.room_circles()]
    assert found == [], "\n".join(map(str, found))


def test_no_folder_is_crowded(ours: house.House) -> None:
    assert ours.crowded() == []


def made(root: Path, **files: str) -> house.House:
    """A small house: path with `__` for `/` -> source."""
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.read_house(root)


def test_circles_are_found_also_where_a_function_imports(tmp_path: Path) -> None:
    read = made(
        tmp_path,
        ops__a__one="from ..b.two import x\nfrom .three import y",
        ops__b__two="def f():\n    from ..a import one",
        ops__a__three="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import z",
    )
    (modules,), (rooms,) = read.module_circles(), read.room_circles()
    assert modules.places == ("ops/a/one", "ops/b/two") and rooms.places == ("ops/a", "ops/b")
    assert "ops/b/two.py:2 imports ops/a/one" in str(modules)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"ops__a": "from ..runtime import b", "runtime__b": ""}, ["ops/a.py:1 imports runtime/b"]),
        ({"graphs__a": "import sidestream.compiler.b", "compiler__b": ""}, ["graphs/a.py:1 imports compiler/b"]),
        (
            {"compiler__a": "def f():\n    from ..graphs.b import c", "graphs__b": ""},
            ["compiler/a.py:2 imports graphs/b"],
        ),
        ({"tools__a": "from ..ops.b import c\nfrom ..runtime import d", "ops__b": "", "runtime__d": ""}, []),
    ],
)
def test_imports_of_a_floor_above_are_found(tmp_path: Path, files: dict[str, str], said: list[str]) -> None:
    assert made(tmp_path, **files).upward() == said


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    files = {f"{room}__f{count}": "" for room in ("ops__a", "compiler__passes") for count in range(21)}
    assert made(tmp_path, **files).crowded() == ["ops/a has 21 files"]


def test_the_command_prints_rooms_arrows_and_what_is_broken(
    ours: house.House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "read_house", lambda: ours)
    assert house.main() == 0
    shown = capsys.readouterr().out
    assert "  tools/pages " in shown and "  ops/rows -> ops/core\n" in shown and "upward imports: none\n" in shown


def test_every_folder_has_a_map_of_its_files() -> None:
    """A folder's `__init__` names each of its modules and folders."""
    root = Path(house.__file__).parents[2]
    missing = []
    for floor in ("ops", "graphs", "compiler", "runtime", "tools"):
        for path in sorted((root / floor).rglob("__init__.py")):
            others = {each.stem for each in path.parent.glob("*.py") if not each.name.startswith("__")}
            rooms = {each.parent.name for each in path.parent.glob("*/__init__.py")}
            words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(path.read_text())) or ""))
            missing += [f"{path.relative_to(root)}: {name}" for name in sorted((others | rooms) - words)]
    assert missing == []
