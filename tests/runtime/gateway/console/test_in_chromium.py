"""The console in a real browser, with a user's and an admin's key, on a phone and on a screen."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sidestream.runtime.api.errors import EngineDeadError
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.interfaces import GatewayHealth
from sidestream.runtime.gateway.metrics.metrics import Metrics
from support.chromium import Browser, Page, browser, needs_chromium
from support.gateway_served import LiveEngines, served

pytestmark = needs_chromium
USER, ADMIN = "the-users-key", "the-admins-key"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def engines() -> LiveEngines:
    """One engine on a CPU."""
    engines = LiveEngines()
    engines.status = GatewayHealth("ok", engines={"gpu-0": "ok"})
    engines.numbers |= {"on_gpu": 0, "prefix_queries_total": 0, "prefix_hits_total": 0}
    engines.numbers |= {"draft_tokens_total": 0, "accepted_tokens_total": 0}
    return engines


def opened(chromium: Browser, url: str, key: str, width: int) -> Page:
    page = chromium.open(url, width)
    page.wait("document.getElementById('trouble')?.textContent.includes('needs a key')")
    page.run(f"document.getElementById('key').value = {key!r}")
    page.run("document.querySelector('#controls form').requestSubmit()")
    page.wait("document.getElementById('status').textContent === 'ok'")
    return page


def go_to(page: Page, tab: str) -> None:
    page.run(f"[...document.querySelectorAll('#tabs button')].find((each) => each.textContent === {tab!r}).click()")


def ask(url: str, model: str, request_id: str, key: str = USER) -> int:
    body = {"model": model, "prompt": "tell", "max_tokens": 6}
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": request_id}
    return httpx.post(f"{url}v1/completions", json=body, headers=headers, timeout=60).status_code


def check_layout(page: Page, width: int, path: Path) -> None:
    """Nothing is wider than the window, and no script failed. The picture is for a reader."""
    page.screenshot(path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert page.run("document.documentElement.scrollWidth") <= width and page.problems() == []


@pytest.mark.parametrize("width", [390, 1400])
def test_a_users_key_shows_models_and_the_playground(
    chromium: Browser, engines: LiveEngines, width: int, tmp_path: Path
) -> None:
    with served(engines, NoAuth(USER, ADMIN)) as url:
        page = opened(chromium, url, USER, width)
        text = page.text()
        assert "This key may not read /metrics" in text and "pirate" in text and "gpu-0" in text
        assert page.run("document.getElementById('trouble').hidden")
        assert "tokens a second" not in text and "Owners" not in text
        check_layout(page, width, tmp_path / "live.png")
        go_to(page, "Day")
        assert "may not read the history" in page.text()
        go_to(page, "Playground")
        page.run("document.getElementById('model-left').value = 'base'; document.getElementById('prompt').value = 'hi'")
        page.run("document.getElementById('most').value = 5; document.getElementById('go').click()")
        page.wait("document.getElementById('progress').textContent.includes('has answered')")
        for side in ("left", "right"):
            assert page.run(f"document.getElementById('answer-{side}').textContent") == "a b c d e "
        assert {request.adapter for request in engines.asked} == {None, "shout"}
        check_layout(page, width, tmp_path / "playground.png")


@pytest.mark.parametrize("width", [390, 1400])
def test_an_admins_key_shows_all_figures(chromium: Browser, engines: LiveEngines, width: int, tmp_path: Path) -> None:
    metrics = Metrics()
    with served(engines, NoAuth(USER, ADMIN), metrics) as url:
        page = opened(chromium, url, ADMIN, width)
        page.wait("document.querySelectorAll('svg.chart').length === 4")
        labels = page.run("[...document.querySelectorAll('svg.chart')].map((each) => each.textContent).join(' ')")
        assert "no data yet" in labels and not re.search(r"\d ms|0\.0\D+0\.0\D+0\.0", labels), "an axis needs data"

        asyncio.run(metrics.add_sample(engines))
        assert [ask(url, "base", "r-base"), ask(url, "shout", "r-shout")] == [200, 200]
        engines.problem = lambda request: EngineDeadError("gone", "engine_dead")
        assert ask(url, "pirate", "r-failed") == 503 and ask(url, "nothing", "r-unknown") == 404
        engines.numbers |= {"prefix_queries_total": 200, "prefix_hits_total": 150, "tokens_total": 2000}
        engines.numbers |= {"draft_tokens_total": 50, "accepted_tokens_total": 20}
        asyncio.run(metrics.add_sample(engines))
        page.wait("document.body.innerText.includes('75%')")
        text = page.text()
        assert re.search(r"75%\s+of prompt tokens from the prefix cache", text)
        assert re.search(r"40%\s+of draft tokens accepted", text) and "in the queue" in text
        assert re.search(r"base\s+base\s+1\s+6\s", text), "requests to the base model have a row"
        assert re.search(r"everyone\s+3\s+\d+", text), "owners"
        assert re.search(r"pirate\s+503 engine_dead\s+/v1/completions\s+1\s+1", text), text
        assert "gpu-0: CPU" in text and "GPU" not in text.replace("gpu-0", "")
        page.wait("document.body.innerText.includes('r-failed')")
        assert "r-unknown" in page.text() and "r-base" not in page.text()
        check_layout(page, width, tmp_path / "live.png")

        page.run("forgetHistory()")
        page.wait("day.samples.length === 2")
        go_to(page, "Day")
        page.wait("document.body.innerText.includes('Mean times')")
        text = page.text()
        assert "prefix cache: 75%" in text and "drafts accepted: 40%" in text and "all engines: –" not in text
        check_layout(page, width, tmp_path / "day.png")


def test_forgetting_the_key_shows_what_is_missing(chromium: Browser, engines: LiveEngines) -> None:
    with served(engines, NoAuth(USER, ADMIN)) as url:
        page = opened(chromium, url, ADMIN, 1400)
        page.run("document.getElementById('forget').click()")
        page.wait("document.getElementById('status').textContent === 'needs a key'")
        assert page.run("sessionStorage.length") == 0
