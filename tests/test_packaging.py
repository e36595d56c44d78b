"""What is shipped: the wheel's content, an editable install without a network, and an import that costs nothing."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import sidestream
from support.installed import pip

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = ("ops", "graphs", "compiler", "runtime", "tools")


@pytest.fixture(scope="module")
def content(wheel: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel)


def test_the_wheel_holds_every_module(content: zipfile.ZipFile) -> None:
    expected = {
        f"sidestream/{path.relative_to(ROOT).as_posix()}"
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts and not path.is_relative_to(ROOT / "tools" / "dev")
    }
    assert expected | {"sidestream/__init__.py"} <= set(content.namelist())


def test_the_wheel_holds_the_demo_model_tuned_settings_and_the_page(content: zipfile.ZipFile) -> None:
    data = [
        path
        for folder in ("tools/demo_model", "ops/linear/tuned", "compiler/inspect/page")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".json", ".safetensors", ".html", ".css", ".js")
    ]
    assert "sidestream/compiler/inspect/page/page.html" in content.namelist()
    assert {f"sidestream/{path.relative_to(ROOT).as_posix()}" for path in data} <= set(content.namelist())
    assert "sidestream/tools/demo_model/model.safetensors" in content.namelist()


def test_the_wheel_holds_nothing_else(content: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in content.namelist()}
    assert top == {"sidestream", f"sidestream-{sidestream.__version__}.dist-info"}, (
        "nothing may land in site-packages next to the package"
    )
    assert not [name for name in content.namelist() if "/tests/" in name or name.startswith("sidestream/tests")]
    assert not [name for name in content.namelist() if name.startswith("sidestream/tools/dev")]


def test_an_editable_install_needs_no_network(wheel: Path, tmp_path: Path) -> None:
    sources = wheel.parent / "sources"
    pip(
        "install",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--target",
        str(tmp_path),
        "-e",
        ".",
        cwd=sources,
    )
    code = (
        f"import site; site.addsitedir({str(tmp_path)!r}); import sidestream.ops.core.kv_layout as layout; "
        "print(layout.__file__)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, *{sys.path[1:]!r}]; {code}"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()) == sources / "ops" / "core" / "kv_layout.py"


def test_import_brings_the_standard_library_only() -> None:
    code = "import sys; before = set(sys.modules); import sidestream; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = {name.partition(".")[0] for name in done.stdout.split()}
    assert "sidestream" in brought and not brought - {"sidestream"} - sys.stdlib_module_names


@pytest.mark.parametrize(
    "module",
    [
        "tools.cli",
        "runtime.server.batcher",
        "runtime.server.supervisor",
        "runtime.gateway.server_process",
        "runtime.adapters.describer_process",
        "runtime.text.structured.trial_process",
        "runtime.text.chat_template_process",
    ],
)
def test_processes_that_compute_nothing_start_without_torch(module: str) -> None:
    code = f"import sys, sidestream.{module}; print(*sorted({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_subpackage_is_listed() -> None:
    present = {
        "sidestream",
        *(
            f"sidestream.{path.parent.relative_to(ROOT).as_posix().replace('/', '.')}"
            for folder in SOURCES
            for path in (ROOT / folder).rglob("__init__.py")
            if not path.is_relative_to(ROOT / "tools" / "dev")
        ),
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == present


def test_the_version_is_said_once_and_the_changelog_begins_with_it() -> None:
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+) - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)
    assert versions[0] == sidestream.__version__
    assert versions == sorted(set(versions), key=lambda each: tuple(map(int, each.split("."))), reverse=True)
    for section in re.split(r"^## ", changes, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (\w+)$", section, re.MULTILINE)
        assert len(kinds) == len(set(kinds)), f"a heading occurs twice in {section.splitlines()[0]}"


def test_what_callers_need_is_exported() -> None:
    loaded = {name: getattr(sidestream, name) for name in sidestream.__all__}
    assert issubclass(loaded["EngineDeadError"], loaded["ServerError"])
    errors = {"RequestError", "OptionError", "CapacityError", "OverloadedError", "DeadlineError"}
    assert all(issubclass(loaded[name], Exception) for name in errors)
    assert {"RequestOutput", "CompletionOutput", "Logprob", "LoRARequest", "EngineOptions"} < set(loaded)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = sidestream.Nothing
