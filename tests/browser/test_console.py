"""The console in a real browser: it shows the values of /metrics and streams one prompt to two adapters."""

import math
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest
from sidestream.runtime.api.errors import OverloadedError
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.interfaces import AdapterCard, GatewayHealth
from support.browser import Browser
from support.gateway_served import LiveEngines, served
from support.page_checks import cut_off, nameless_controls, poor_contrast, prefer, small_targets, wait_for

TEXT = "return document.querySelector(arguments[0]).innerText"
SAMPLED = "return samples.length > 0"
TABS = ("live", "day", "playground")


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[LiveEngines, str]]:
    engines = LiveEngines()
    with served(engines) as address:
        yield engines, address


@pytest.fixture
def engines(running: tuple[LiveEngines, str]) -> LiveEngines:
    """As they were when they began."""
    engines, _ = running
    engines.asked.clear()
    engines.left.clear()
    engines.problem, engines.pause, engines.most = (lambda request: None), 0.01, math.inf
    return engines


@pytest.fixture
def console(window: Browser, engines: LiveEngines, running: tuple[LiveEngines, str]) -> Browser:
    """The page on a laptop's screen, after its first look."""
    window.size(1360, 900)
    window.prefer("light")
    window.open(running[1])
    window.run("sessionStorage.clear(); localStorage.clear(); location.hash = ''")
    window.open(running[1])
    wait_for(window, SAMPLED)
    return window


def look(window: Browser) -> None:
    """One more look, now."""
    seen = window.run("return latest() ? latest().time : 0")
    window.run("tick()")
    wait_for(window, f"return latest().time > {seen}")


def ask(window: Browser, prompt: str) -> None:
    window.click("#tab-playground")
    window.run("document.getElementById('prompt').value = arguments[0]", prompt)
    window.click("#go")


def failed_loads(window: Browser, *statuses: str) -> None:
    """The browser's own notes of answers that the test wanted, and nothing else."""
    noted = window.errors()
    assert noted and all("Failed to load resource" in each and any(one in each for one in statuses) for each in noted)


def test_it_asks_nobody_but_the_gateway(console: Browser, running: tuple[LiveEngines, str]) -> None:
    asked = console.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    paths = {url.removeprefix(running[1]) for url in asked}
    assert paths == {"metrics", "health", "v1/models", "console/history?after=0"}
    assert console.run("return document.scripts.length") == 1
    console.run(
        "const script = document.createElement('script'); script.text = 'broken = 1'; document.body.append(script)"
    )
    assert console.run("return typeof broken") == "undefined", "the policy lets no other script run"
    assert any("Content Security Policy" in each for each in console.errors())


def test_the_figures_are_those_of_the_engines(console: Browser, engines: LiveEngines) -> None:
    cards = console.run("return [...document.querySelectorAll('.figures .card')].map((card) => card.innerText)")
    told = {" ".join(card.split()) for card in cards}
    assert "3 · 5 requests running · waiting" in told and "25% of 400 KV pages in use" in told
    assert "1 · 1 · 1 adapters on GPU · host · disk" in told
    assert "base, 2 adapters, 2 engines, release" in console.run(TEXT, "#subtitle")
    assert console.run(TEXT, "#status") == "ok"
    time.sleep(0.3)
    engines.numbers["tokens_total"] += 600
    engines.numbers["adapter_hits_total"] += 9
    engines.numbers["adapter_misses_total"] += 3
    look(console)
    rate = console.run("return [latest().time - samples[0].time, tokens(latest(), samples[0])]")
    assert rate[0] > 0.2 and rate[1] == pytest.approx(600 / rate[0])
    figures = " ".join(console.run(TEXT, ".figures").split())
    assert "75% of adapters' requests found it on the GPU" in figures
    table = " ".join(console.run(TEXT, "#panel-live").split())
    assert "gpu-0 ok" in table and "100 of 400" in table and "gpu-1 loading" in table
    assert "pirate 8 gpu-0: GPU gpu-1: host" in table and "shout 4 gpu-0: disk" in table


def test_latencies_and_errors_are_those_of_requests(console: Browser, running: tuple[LiveEngines, str]) -> None:
    console.run("return call('/v1/completions', { prompt: 'x', max_tokens: 9 }).then((answer) => answer.text())")
    console.run("return call('/v1/completions', { prompt: 'x', model: 'nobody' }).catch((problem) => problem.status)")
    look(console)
    p50, p99 = console.run(
        "return [0.5, 0.99].map((q) => quantile(latest(), samples[0], 'sidestream_inter_token_seconds', q))"
    )
    assert 0.005 < p50 <= p99, "eight times that were at least 10 ms"
    cards = console.run("return [...document.querySelectorAll('#panel-live .card')].map((card) => card.innerText)")
    (errors,) = (" ".join(card.split()) for card in cards if card.startswith("Errors by model"))
    assert "404 not found POST /v1/completions 1 " in errors
    failed_loads(console, "404")


def test_quantiles_are_prometheus_own(console: Browser) -> None:
    """histogram_quantile of 4, 2, 2 and 2 observations up to 0.1, 0.5, 1 and infinity."""
    first = 'h_bucket{le="0.1"} 4\\nh_bucket{le="0.5"} 6\\nh_bucket{le="1.0"} 8\\nh_bucket{le="+Inf"} 10\\n'
    nothing = 'h_bucket{le="0.1"} 0\\nh_bucket{le="0.5"} 0\\nh_bucket{le="1.0"} 0\\nh_bucket{le="+Inf"} 0\\n'
    script = (
        f"const now = {{ metrics: parseMetrics('{first}') }}, then = {{ metrics: parseMetrics('{nothing}') }}; "
        "return [0.2, 0.5, 0.7, 0.99].map((q) => quantile(now, then, 'h', q)).concat([quantile(then, then, 'h', 0.5)])"
    )
    assert console.run(script) == [pytest.approx(0.05), pytest.approx(0.3), pytest.approx(0.75), 1, None]


def test_labels_are_read_as_prometheus_writes_them(console: Browser) -> None:
    registry, values = CollectorRegistry(), ['a "b" {c="d"}', "back\\slash\\n", "two\nlines", "ümlaut, } x 7"]
    gauge = Gauge("g", 'Help with {odd="things"} 3', ["name"], registry=registry)
    for place, value in enumerate(values):
        gauge.labels(value).set(place + 0.5)
    read = console.run("return parseMetrics(arguments[0]).get('g')", generate_latest(registry).decode())
    assert {labels["name"]: value for labels, value in read} == {name: at + 0.5 for at, name in enumerate(values)}


def test_a_counter_that_began_again_is_no_negative_rate(console: Browser) -> None:
    script = "return grown({ metrics: parseMetrics('c 5\\n') }, { metrics: parseMetrics('c 90\\n') }, 'c')"
    assert console.run(script) == 5


def test_one_prompt_streams_to_two_adapters_at_once(console: Browser, engines: LiveEngines) -> None:
    engines.most = 1
    console.click("#tab-playground")
    console.run("document.getElementById('most').value = 12")
    ask(console, "the same words")
    wait_for(console, "return document.querySelectorAll('.answer.busy').length === 2")
    engines.most = math.inf
    wait_for(console, "return [...document.querySelectorAll('.answer')].every((each) => each.textContent.length > 3)")
    wait_for(console, "return !document.getElementById('go').disabled")
    assert {(each.adapter, each.prompt, each.params.max_tokens) for each in engines.asked} == {
        ("pirate", "the same words", 12),
        ("shout", "the same words", 12),
    }
    for side in ("left", "right"):
        assert console.run(TEXT, f"#answer-{side}").strip() == "a b c d e f g h i j k l"
        facts = console.run(TEXT, f"#answer-{side} + .facts")
        assert "first token after" in facts and "12 tokens" in facts and "tokens/s" in facts and "length" in facts
    assert console.run(TEXT, "#progress") == "pirate has answered. shout has answered."


def test_stop_leaves_both_requests(console: Browser, engines: LiveEngines) -> None:
    engines.most = 3
    ask(console, "on and on")
    wait_for(console, "return [...document.querySelectorAll('.answer')].every((each) => each.textContent.length > 3)")
    console.click("#stop")
    wait_for(console, "return !document.getElementById('go').disabled")
    deadline = time.monotonic() + 60
    while len(engines.left) < 2:
        assert time.monotonic() < deadline, "the gateway's engines were told of both"
        time.sleep(0.02)
    assert console.run(TEXT, "#answer-left + .facts") == "stopped"


def test_what_one_adapter_refuses_is_said_on_its_side_alone(console: Browser, engines: LiveEngines) -> None:
    engines.problem = lambda request: (
        OverloadedError("the queue is full", "overloaded") if request.adapter == "shout" else None
    )
    ask(console, "x")
    wait_for(
        console,
        "return !document.getElementById('go').disabled && document.getElementById('progress').innerText !== ''",
    )
    assert "the queue is full" in console.run(TEXT, "#answer-right + .facts")
    assert console.run(TEXT, "#answer-left").startswith("a b c")
    failed_loads(console, "429")


def test_the_keyboard_does_everything(console: Browser, engines: LiveEngines) -> None:
    console.run("document.activeElement.blur()")
    where = "const node = document.activeElement; return node.id || node.textContent"
    seen = []
    for _ in range(5):
        console.press("Tab")
        seen.append(console.run(where))
    assert seen == ["key", "Use key", "theme", "tab-live", "panel-live"]
    console.run("document.getElementById('tab-live').focus()")
    for _ in TABS[1:]:
        console.press("ArrowRight")
    assert console.run("return location.hash") == "#playground"
    console.run("document.getElementById('prompt').focus()")
    console.press(*"hello")
    console.run(
        "const key = { key: 'Enter', ctrlKey: true, bubbles: true, cancelable: true };"
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', key))"
    )
    wait_for(console, "return document.getElementById('progress').innerText.includes('shout has answered')")
    assert {each.prompt for each in engines.asked} == {"hello"}


def test_hostile_names_are_text(console: Browser, engines: LiveEngines) -> None:
    cards, name = engines.cards, '<img src=x onerror="broken = 1">'
    engines.cards = [*cards, AdapterCard(name, 8, "cc", {"gpu-0": "gpu"})]
    try:
        look(console)
        assert name in console.run(TEXT, "#panel-live")
        console.click("#tab-playground")
        assert name in console.run(
            "return [...document.getElementById('model-left').options].map((each) => each.value)"
        )
        assert console.run("return document.images.length") == 0
    finally:
        engines.cards = cards


def test_an_engine_that_dies_is_seen(console: Browser, engines: LiveEngines) -> None:
    engines.status = GatewayHealth("dead", engines={"gpu-0": "dead", "gpu-1": "dead"})
    try:
        look(console)
        assert console.run(TEXT, "#status") == "dead"
        assert "gpu-1 dead" in " ".join(console.run(TEXT, "#panel-live").split())
        failed_loads(console, "503")
    finally:
        engines.status = GatewayHealth("ok", engines={"gpu-0": "ok", "gpu-1": "loading"})


def test_the_key_is_asked_for_and_kept_for_this_tab_alone(window: Browser) -> None:
    with served(LiveEngines(), NoAuth("a-secret")) as address:
        window.size(1360, 900)
        window.open(address)
        wait_for(window, "return document.getElementById('status').innerText === 'needs a key'")
        assert "This gateway needs a key" in window.run(TEXT, "#trouble")
        window.run("document.getElementById('key').focus()")
        window.press(*"wrong", "Enter")
        wait_for(window, "return document.getElementById('key').hidden && !document.getElementById('trouble').hidden")
        window.click("#forget")
        window.run("document.getElementById('key').focus()")
        window.press(*"a-secret", "Enter")
        wait_for(window, SAMPLED)
        wait_for(window, "return document.getElementById('trouble').hidden")
        assert window.run("return [Object.values(sessionStorage), document.cookie, location.search]") == [
            ["a-secret"],
            "",
            "",
        ]
        assert "a-secret" not in window.run("return JSON.stringify({ ...localStorage }) + document.body.innerText")
        window.open(address)
        wait_for(window, SAMPLED)
        ask(window, "x")
        wait_for(window, "return document.getElementById('progress').innerText.includes('shout has answered')")
        window.click("#forget")
        wait_for(window, "return document.getElementById('status').innerText === 'needs a key'")
        assert window.run("return sessionStorage.length") == 0
        failed_loads(window, "401")
        window.open("about:blank")


def test_a_gateway_that_went_away_is_said(window: Browser) -> None:
    with served(LiveEngines()) as address:
        window.open(address)
        wait_for(window, SAMPLED)
    window.run("tick()")
    wait_for(window, "return document.getElementById('trouble').innerText === 'The gateway does not answer.'")
    failed_loads(window, "ERR_CONNECTION")
    window.open("about:blank")
    window.errors()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_it_is_readable(console: Browser, scheme: str, width: int) -> None:
    console.size(width, 844, phone=width == 390)
    prefer(console, scheme)
    look(console)
    for name in TABS:
        console.click(f"#tab-{name}")
        assert poor_contrast(console) == [], name
        assert cut_off(console) == [], name
        assert small_targets(console, but=".more") == [], name
        assert nameless_controls(console) == [], name
