"""`index.html` in a real browser: loads quickly and without complaint, every tab works by click and by keyboard, and
nothing overflows on a phone.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidestream.compiler.cost.resources import Resources
from sidestream.compiler.cost.timings import Timings
from support.browser import CHROMIUM, DRIVER, Browser, browser
from support.dumped import DECODE, compiled_on_meta, dumped_8b
from support.meta import FIELDS

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")

TABS = ("overview", "passes", "schedule", "memory", "kernels")
SHOWN = (
    "return [...document.querySelectorAll('[role=tabpanel]')].filter((panel) => !panel.hidden).map((panel) => panel.id)"
)
FOCUS = (
    "const active = document.activeElement; return active.id || active.dataset.step || active.dataset.pass || "
    "active.className"
)
INSIDE = """
const box = document.querySelector('svg.chart[role=group]').viewBox.baseVal, number = (rect, name) => Number(rect.getAttribute(name));
return [...document.querySelectorAll('svg .rect')].every((rect) => number(rect, 'y') >= 0 && number(rect, 'y') + number(rect, 'height') <= box.height)"""
POOR_CONTRAST = """
const linear = (value) => value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
const light = (text) => { const [r, g, b] = text.match(/[0-9.]+/g).map(Number); return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b); };
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$|transparent/.test(color)) return color;
  }
};
const poor = [];
for (const node of document.querySelectorAll('[role=tabpanel]:not([hidden]) *, header *, [role=tab]')) {
  if (node.closest('svg') || ![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
  const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x), contrast = (a + 0.05) / (b + 0.05);
  if (contrast < 4.5) poor.push([node.tagName, node.className, node.textContent.slice(0, 30), contrast]);
}
return poor;"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dumped_8b(tmp_path_factory.mktemp("dump"))


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def opened(window: Browser, page: Path) -> Browser:
    """The page, freshly loaded on a laptop's screen; at the end nothing may have been said on the console."""
    window.size(1360, 900)
    window.prefer("light")
    window.open(page)
    window.run("try { localStorage.clear() } catch {} location.hash = ''")
    window.open(page)
    return window


@pytest.fixture(autouse=True)
def silent_console(window: Browser) -> Iterator[None]:
    window.errors()
    yield
    assert window.errors() == []


def prefer(window: Browser, scheme: str) -> None:
    """Change the system's colour scheme, and wait until the page has noticed."""
    window.prefer(scheme)
    deadline = time.monotonic() + 5
    while window.run("return document.documentElement.dataset.theme") != scheme:
        assert time.monotonic() < deadline, f"the page does not follow the system to {scheme}"
        time.sleep(0.02)


def test_the_page_shows_its_overview_and_asks_for_nothing(window: Browser, page: Path) -> None:
    window.open(page)
    assert "32 layers" in window.run("return document.querySelector('h1').textContent")
    assert window.run("return document.querySelectorAll('#panel-overview table tbody tr').length") > 10
    assert window.run("return performance.getEntriesByType('resource').length") == 0, (
        "the page asked for something outside itself"
    )


def test_every_tab_opens_by_click(opened: Browser) -> None:
    for name in TABS:
        opened.click(f"#tab-{name}")
        assert opened.run(SHOWN) == [f"panel-{name}"]
        assert opened.run("return document.getElementById(arguments[0]).innerText.length", f"panel-{name}") > 200
        assert opened.run("return document.querySelector('[aria-selected=true]').id") == f"tab-{name}"
        assert opened.run("return location.hash") == f"#{name}"


def test_every_tab_opens_by_keyboard(opened: Browser) -> None:
    opened.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    for name in (*TABS[1:], TABS[0]):
        opened.press("ArrowRight")
        assert opened.run(SHOWN) == [f"panel-{name}"] and opened.run(FOCUS) == f"tab-{name}"
    opened.press("ArrowLeft")
    assert opened.run(SHOWN) == ["panel-kernels"]
    opened.press("Home")
    assert opened.run(SHOWN) == ["panel-overview"]
    opened.press("End")
    assert opened.run(SHOWN) == ["panel-kernels"]
    assert opened.run("return document.querySelectorAll('[role=tab][tabindex=\"0\"]').length") == 1
    opened.press("Tab")
    assert opened.run(FOCUS) == "panel-kernels"


def test_the_strip_chooses_a_pass_and_the_graph_shows_what_changed(opened: Browser) -> None:
    opened.click("#tab-passes")
    opened.click('[data-pass="fuse_rope_append"]')
    assert opened.run("return document.querySelector('[aria-pressed=true]').dataset.pass") == "fuse_rope_append"
    count = "return document.querySelectorAll(arguments[0]).length"
    assert (
        opened.run(count, ".line.del.before") > 5
        and opened.run(count, ".line.add.after") == 1
        and opened.run(count, ".line.chg.after") == 1
    )
    assert "rope_append" in opened.run("return document.querySelector('.line.add.after').textContent")
    opened.run("document.querySelector('.line.add.after').focus()")
    told = opened.run("return document.getElementById('tip').innerText")
    assert "512 KiB at T = 64" in told and "graphs/llama.py:" in told and "model.layers.0.self_attn" in told
    opened.press("ArrowDown")
    assert "line" in opened.run(FOCUS)
    opened.press("Escape")
    assert opened.run("return document.getElementById('tip').hidden")
    opened.run("document.querySelector('[data-pass=\"fuse_rope_append\"]').focus()")
    opened.press("ArrowRight")
    assert "balance_keys" in opened.run("return document.querySelector('#panel-passes h2').textContent")


def test_layers_are_shown_one_at_a_time_and_remembered_by_every_tab(opened: Browser) -> None:
    opened.click("#tab-passes")
    opened.click('#panel-passes [aria-label="next layer"]')
    assert "layers_1_" in opened.run("return document.querySelector('.diff').textContent")
    assert "layers_0_" not in opened.run("return document.querySelector('.diff').textContent")
    opened.click("#tab-schedule")
    assert opened.run("return document.querySelector('#panel-schedule select').value") == "1"


def test_a_kernel_in_the_schedule_tells_its_cost(opened: Browser) -> None:
    opened.click("#tab-schedule")
    lanes = opened.run(
        "return [...document.querySelectorAll('.step')].map((step) => [step.ariaLabel, step.offsetLeft, "
        "step.offsetTop, step.offsetHeight])"
    )
    assert len(lanes) == 17 and len({left for _, left, _, _ in lanes}) == 2
    # four forks, three joins; the fourth join is the next layer's
    assert opened.run("return document.querySelectorAll('path.wait').length") == 7
    heights = {text.split()[1].rstrip(","): height for text, _, _, height in lanes}
    assert heights["silu_mul_quant"] < heights["paged_attention_quant"]
    opened.run("document.querySelector('.step').focus()")
    opened.press("ArrowDown", "ArrowDown", "Enter")
    step = opened.run(FOCUS)
    facts = opened.run("return document.querySelector('#panel-schedule aside').innerText")
    assert f"{step} " in facts and all(
        word in facts for word in ("waits for", "floor reached", "bound by", "Reads", "Writes")
    )
    opened.click("#panel-schedule aside p button.link")
    assert opened.run(SHOWN) == ["panel-kernels"] and "def " in opened.run(
        "return document.querySelector('pre.source').textContent"
    )


def test_buffers_of_the_memory_plan_can_be_chosen(opened: Browser) -> None:
    opened.click("#tab-memory")
    assert opened.run("return document.querySelectorAll('svg .rect').length") > 20
    opened.run("document.querySelector('svg .rect').focus()")
    opened.press("ArrowRight", "Enter")
    assert "lives" in opened.run("return document.querySelector('#panel-memory aside').innerText")
    assert opened.run(INSIDE)


def test_the_other_program_and_all_layers_work_in_every_tab(opened: Browser) -> None:
    opened.run(
        "const choice = document.getElementById('program'); choice.value = '1'; choice.dispatchEvent(new "
        "Event('change'))"
    )
    opened.run("state.layer = 'all'; changed('layer')")
    for name in TABS:
        opened.click(f"#tab-{name}")
        assert opened.run("return document.getElementById(arguments[0]).innerText.length", f"panel-{name}") > 200
    opened.click("#tab-schedule")
    assert opened.run("return document.querySelectorAll('.step').length") > 300


def test_the_theme_follows_the_system_and_the_button(opened: Browser) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    light = opened.run(background)
    prefer(opened, "dark")
    assert opened.run(background) != light
    opened.click("#theme")
    assert opened.run(background) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(opened: Browser, scheme: str) -> None:
    prefer(opened, scheme)
    for name in TABS:
        opened.click(f"#tab-{name}")
        assert opened.run(POOR_CONTRAST) == [], name


def test_nothing_is_cut_off_on_a_phone(opened: Browser) -> None:
    opened.size(390, 844, phone=True)
    for name in TABS:
        opened.click(f"#tab-{name}")
        width, inner = opened.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert width <= inner == 390, name
        left, right = opened.run(
            "const box = document.getElementById(arguments[0]).getBoundingClientRect(); return [box.left, box.right]",
            f"tab-{name}",
        )
        assert 0 <= left < right <= 390, name


def test_a_step_and_its_kernel_tell_registers_and_shared_memory(window: Browser, tmp_path: Path) -> None:
    compiled = compiled_on_meta(FIELDS, 1)
    steps = compiled.program(DECODE).steps
    chosen = next(step.index for step in steps if step.op == "sidestream.rms_norm_quant")
    variants = [
        ("ops.rows.rms_norm._rms_norm_kernel", {"registers": 37, "spills": 0, "shared_bytes": 1088, "warps": 16})
    ]
    refused = {"sidestream.silu_mul_quant": "CompilationError: no <reason>"}
    resources = Resources(
        "sm_90", variants, {DECODE.name: [[0] if step.index == chosen else [] for step in steps]}, refused
    )
    window.size(1360, 900)
    window.open(
        compiled.dump(tmp_path, [DECODE], timings=Timings(resources=resources), show_resources=True) / "index.html"
    )
    window.click("#tab-schedule")
    facts = "return document.querySelector('#panel-schedule aside').innerText"
    window.run("state.step = arguments[0]; changed('step')", chosen)
    assert "_rms_norm_kernel: 37 registers, 0 spilled, 1.06 KiB shared memory, 16 warps" in window.run(facts)
    window.run(
        "state.step = arguments[0]; changed('step')",
        next(step.index for step in steps if step.op == "sidestream.silu_mul_quant"),
    )
    assert "not compiled: CompilationError: no <reason>" in window.run(facts)
    window.run("state.op = 'sidestream.rms_norm_quant'; openTab('kernels'); changed('op')")
    shown = window.run("return document.querySelector('#panel-kernels').innerText")
    assert "37 registers" in shown and "for sm_90" in shown
    window.run("state.op = 'sidestream.linear_8bit'; changed('op')")
    assert "launched by none of these programs" in window.run(
        "return document.querySelector('#panel-kernels').innerText"
    )


def test_measured_steps_can_be_shown_in_place_of_estimates(window: Browser, tmp_path: Path) -> None:
    compiled = compiled_on_meta(FIELDS, 1)
    steps = compiled.program(DECODE).steps
    timings = Timings(steps={DECODE.name: [(5e-6 * index, 5e-6 * index + 4e-6) for index in range(len(steps))]})
    window.size(1360, 900)
    window.open(compiled.dump(tmp_path, [DECODE], timings=timings, show_timings=True) / "index.html")
    window.click("#tab-schedule")
    assert "4.00 µs" in window.run("return document.querySelector('.step').textContent")
    window.run(
        "const choice = document.getElementById('durations'); choice.value = 'estimated'; choice.dispatchEvent(new "
        "Event('change'))"
    )
    assert "4.00 µs" not in window.run("return document.querySelector('.step').textContent")
    window.click("#tab-passes")
    assert " ms" in window.run("return document.querySelector('.pass').textContent")
    shutil.rmtree(tmp_path)
