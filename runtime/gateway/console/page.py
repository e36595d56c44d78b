"""Assembles the console as one self-contained page. It holds no data of the server, so it needs no key."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from .... import __version__

PACKAGE = __name__.partition(".runtime.")[0]

SHARED = ("look.css", "dom.js", "tabs.js")
"""Files of the page of `sidestream inspect dump`, read as files since importing the compiler would load torch."""
SCRIPTS = ("dom.js", "tabs.js", "connection.js", "metrics.js", "live.js", "playground.js", "main.js")
STYLES = ("look.css", "console.css")


@cache
def console_page() -> tuple[bytes, dict[str, str]]:
    """Return the page in UTF-8, and headers that allow only its own script and style and forbid all loads."""
    style, script = ("\n".join(map(read_file, names)) for names in (STYLES, SCRIPTS))
    page = read_file("console.html").replace("<!--VERSION-->", __version__)
    page = page.replace("<!--STYLE-->", style, 1).replace("<!--SCRIPT-->", script, 1)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src '{_policy_hash(style)}'; "
        f"script-src '{_policy_hash(script)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page.encode(), headers


def read_file(name: str) -> str:
    """Return the text of one file of the page."""
    root = files(PACKAGE)
    folder = root.joinpath("compiler", "inspect", "page") if name in SHARED else files(__package__)
    return folder.joinpath(name).read_text(encoding="utf-8")


def _policy_hash(text: str) -> str:
    """Return the hash of an element's text for a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
