"""What mkdocs does to the pages of docs/ when it builds the site (`make docs`).

mkdocs loads this file by its path, so its imports are absolute. CONTRIBUTING.md and CHANGELOG.md become pages of the
site; directives are filled in (see api); a link to a file of the repository that is no page becomes a link to
`repo_url`, or where the site has none, the file's path. Where a list or a table follows a paragraph at once, as GitHub
allows, mkdocs gets the blank line that it needs.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from sidestream.tools.dev.pages.api import DirectiveError, expanded

ROOT = Path(__file__).parents[3]
FROM_THE_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
HOME = {"README.md": "index.md"}
BLOCK = re.compile(r"- |\d+\. |\|")
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*)\]\((?P<target>(?!https?://|mailto:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that do not lie in docs/."""
    for name, page in FROM_THE_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's Markdown with directives filled in and links that lead somewhere on the site."""
    uri = page.file.src_uri
    origin = next((name for name, found in FROM_THE_ROOT.items() if found == uri), f"docs/{uri}")
    try:
        linked = LINK.sub(lambda link: _link(link, origin, uri, config["repo_url"]), _spaced(markdown))
        return expanded(linked)
    except DirectiveError as problem:
        raise PluginError(f"{origin}: {problem}") from None


def _spaced(markdown: str) -> str:
    """The same with a blank line between a paragraph and the list or the table after it."""
    lines: list[str] = []
    fenced = False
    for line in markdown.split("\n"):
        fenced ^= line.startswith("```")
        before = lines[-1] if lines else ""
        if (
            not fenced
            and BLOCK.match(line)
            and before
            and not BLOCK.match(before)
            and not before.startswith((" ", "#"))
        ):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _link(link: re.Match[str], origin: str, uri: str, repository: str | None) -> str:
    """A link as the site has it; `origin` is the page's path in the repository, `uri` the one on the site."""
    path = os.path.normpath(PurePosixPath(origin).parent / link["target"])
    if not (ROOT / path).exists():
        raise PluginError(f"{origin} links to {link['target']}, which there is not")
    if path in FROM_THE_ROOT or path in HOME:
        target = (FROM_THE_ROOT | HOME)[path]
    elif path.startswith("docs/") and (ROOT / path).is_file() and not path.endswith(".py"):
        target = path.removeprefix("docs/")
    elif path.startswith("docs/") and (ROOT / path / "README.md").is_file():
        target = f"{path.removeprefix('docs/')}/README.md"
    elif repository:
        return f"[{link['text']}]({repository.rstrip('/')}/blob/main/{path})"
    else:
        return link["text"] if path in link["text"] else f"{link['text']} (`{path}`)"
    relative = os.path.relpath(target, PurePosixPath(uri).parent)
    return f"[{link['text']}]({relative}{link['anchor'] or ''})"
