"""The site that `make docs` builds: no warning, nothing from other hosts, every exported name and command on it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sidestream
from sidestream.tools.cli import build_parser
from sidestream.tools.dev.pages.api import commands

build = pytest.importorskip("mkdocs.commands.build", reason="needs the extra `docs`")
from mkdocs.config import load_config  # noqa: E402
from mkdocs.exceptions import Abort  # noqa: E402

ROOT = Path(__file__).parents[1]
LOADED = re.compile(r'<(?:script|img|source|iframe|video|audio|object|link)\b[^>]*?\b(?:src|href|data)="([^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; every warning is an error, as in `make docs`."""
    place = tmp_path_factory.mktemp("site")
    build.build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(place)))
    return place


def texts(site: Path) -> Iterator[tuple[str, str]]:
    return ((page.relative_to(site).as_posix(), page.read_text()) for page in sorted(site.rglob("*.html")))


def test_every_page_is_on_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        target = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (target.with_name("index.html") if target.stem == "README" else target)).is_file()
    assert (site / "contributing.html").is_file() and (site / "changelog.html").is_file()


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    loaded = {(page, found) for page, text in texts(site) for found in LOADED.findall(text)}
    assert len(loaded) > 50
    assert not [each for each in sorted(loaded) if re.match(r"\w+:|//", each[1]) and not each[1].startswith("data:")]
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_lists_and_tables_are_lists_and_tables(site: Path) -> None:
    """GitHub sees them also right after a paragraph, mkdocs after a blank line only."""
    for page, text in texts(site):
        prose = re.sub(r"<(pre|script|style|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        paragraphs = re.findall(r"<p>(.*?)</p>", prose, re.DOTALL)
        assert not [each[:80] for each in paragraphs if re.search(r"^(- |\d\. |\|)", each, re.MULTILINE)], page


def test_every_exported_name_is_described_with_its_methods(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in sidestream.__all__[1:]:
        assert f'id="{name.lower()}"' in text, name
    for method in ("LLM.generate", "LLM.add_adapter", "Client.stream", "AsyncClient.abort", "CompiledModel.dump"):
        assert f"{method}<" in text, method
    assert ":::" not in text and "&lt;function" not in text


def test_every_command_s_help_is_there(site: Path) -> None:
    text = (site / "commands.html").read_text()
    assert ":::" not in text
    for command in commands(build_parser()):
        assert f"usage: {command.prog}" in text, command.prog


@pytest.mark.parametrize(
    "fault",
    ["[there](nowhere.md)", "[there](protocol.md#nowhere)", "[there](../ops/nowhere.py)", "::: sidestream.Nothing"],
)
def test_a_fault_of_a_page_ends_the_build(fault: str, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Home\n\n{fault}\n")
    (docs / "protocol.md").write_text("# Protocol\n")
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        strict=True,
        docs_dir=str(docs),
        site_dir=str(tmp_path / "site"),
        nav=["index.md", "protocol.md", "contributing.md", "changelog.md"],
        theme={"name": "mkdocs"},
    )
    with pytest.raises(Abort):
        build.build(config)
