"""The page as one file: markup, style, scripts and data put together, nothing loaded from anywhere."""

import html
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "dom.js",
    "base.js",
    "tabs.js",
    "overview.js",
    "passes.js",
    "schedule.js",
    "memory.js",
    "kernels.js",
    "start.js",
)


def render(data: Mapping[str, Any]) -> str:
    """`data` (from `page_data`) as HTML text."""
    # `</script>` can't end the element
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    scripts = "\n".join(part(name) for name in SCRIPTS)
    page = part("page.html")
    for mark, content in (
        ("TITLE", html.escape(data["title"])),
        ("STYLE", part("look.css") + part("page.css")),
        ("SCRIPT", scripts),
        ("DATA", text),
    ):
        page = page.replace(f"<!--{mark}-->", content, 1)
    return page


@cache
def part(name: str) -> str:
    """One of the files that the page is put together from."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
