"""The console as one self-contained page. It says nothing about the server, so it needs no key."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from .... import __version__

PACKAGE = __name__.partition(".runtime.")[0]

SHARED = ("look.css", "dom.js", "tabs.js")
"""Files of the dump's page; read as files, since importing the compiler would load torch."""
SCRIPTS = ("dom.js", "tabs.js", "connection.js", "metrics.js", "live.js", "playground.js", "begin.js")
STYLES = ("look.css", "console.css")


@cache
def console_page() -> tuple[bytes, dict[str, str]]:
    """The page in UTF-8, and its headers: nothing is loaded from anywhere, and no script runs but its own."""
    style, script = ("\n".join(map(part, names)) for names in (STYLES, SCRIPTS))
    page = part("console.html").replace("<!--VERSION-->", __version__)
    page = page.replace("<!--STYLE-->", style, 1).replace("<!--SCRIPT-->", script, 1)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page.encode(), headers


def part(name: str) -> str:
    """One of the files that the page is put together from."""
    root = files(PACKAGE)
    folder = root.joinpath("compiler", "inspect", "page") if name in SHARED else files(__package__)
    return folder.joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Of the text between an element's tags, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
