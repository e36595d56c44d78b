"""The console's HTML: complete, available without a key, and with a policy that forbids all loads."""

import asyncio
import base64
import hashlib
import re

from sidestream.runtime.gateway.api.pages import SCRIPTS, STYLES, read_file
from support.gateway import Books, FakeEngines, gateway


def test_it_needs_no_key_and_says_nothing_about_the_server() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines(), Books(api_key="secret")) as http:
            page, other = await http.get("/"), await http.get("/metrics")
        assert (page.status_code, other.status_code) == (200, 401)
        assert page.headers["content-type"].startswith("text/html")
        assert not {"pirate", "shout", "secret"} & set(re.findall(r"\w+", page.text))

    asyncio.run(scene())


def test_its_policy_allows_its_own_script_and_style_and_nothing_else() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            page = await http.get("/")
        policy = dict(rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";"))
        for tag in ("script", "style"):
            (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
        assert policy.pop("connect-src") == "'self'" and policy.pop("img-src") == "data:"
        assert len(policy) == 4 and set(policy.values()) == {"'none'"}
        loads = r"""(src|href)\s*=\s*["'](?!data:)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)|style="|onclick="""
        assert not re.search(loads, page.text) and "<!--" not in page.text

    asyncio.run(scene())


def test_its_scripts_are_small_enough_to_read_and_write_no_markup() -> None:
    assert all(
        read_file(name).startswith(("//", '"use strict";')) and read_file(name).count("\n") < 200 for name in SCRIPTS
    )
    markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(")
    assert not any(markup.search(read_file(name)) for name in SCRIPTS)
    assert all(read_file(name) for name in STYLES)
