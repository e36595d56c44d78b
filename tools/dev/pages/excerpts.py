"""Pages whose fenced blocks are made by functions, so that they can't rot.

An excerpt is a fenced block after a line `<!-- excerpt: NAME -->`; NAME is a key of the page's excerpts. A table is
what lies between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

BLOCK = re.compile(r"(<!-- excerpt: (?P<name>[^>\n]+?) -->\n```\w*\n)(?P<text>.*?)(```\n)", re.DOTALL)
TABLE = re.compile(r"(<!-- table: (?P<name>[^>\n]+?) -->\n)(?P<text>.*?)(<!-- end -->\n)", re.DOTALL)
Excerpts = Mapping[str, Callable[[], str]]


class ExcerptError(ValueError):
    """The page asks for an excerpt that there is not, or an excerpt finds nothing to show."""


def rewritten(page: str, excerpts: Excerpts) -> str:
    """The page with every excerpt as it is today. Raises ExcerptError for an unknown excerpt or an empty one."""

    def replace(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in excerpts:
            raise ExcerptError(f"there is no excerpt {name!r}; there are: {', '.join(excerpts)}")
        text = excerpts[name]()
        if not text.strip():
            raise ExcerptError(f"the excerpt {name!r} is empty: what it shows has moved")
        return f"{block[1]}{text}{block[4]}"

    return TABLE.sub(replace, BLOCK.sub(replace, page))


def keep_true(program: str, description: str, pages: Mapping[Path, Excerpts], arguments: Sequence[str] | None) -> int:
    """`keep_pages` for pages of excerpts and tables."""
    return keep_pages(
        program,
        description,
        {page: partial(rewritten, excerpts=excerpts) for page, excerpts in pages.items()},
        arguments,
    )


def keep_pages(
    program: str, description: str, pages: Mapping[Path, Callable[[str], str]], arguments: Sequence[str] | None
) -> int:
    """The command line of a page's keeper. Each page has a function from its text as it stands to its text as it
    should be. Compares (exit code 1 and a diff where something is out of date), or rewrites with --write.
    """
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="rewrite the page")
    parser.add_argument(
        "--page",
        type=Path,
        help=f"a page in place of the first (all of them: {', '.join(str(page.name) for page in pages)})",
    )
    options = parser.parse_args(arguments)
    stale = 0
    for page, make in pages.items() if options.page is None else [(options.page, next(iter(pages.values())))]:
        before = page.read_text(encoding="utf-8")
        after = make(before)
        if options.write:
            page.write_text(after, encoding="utf-8")
            continue
        print(
            "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "on the page", "today")),
            end="",
        )
        stale |= before != after
    return int(stale)
