"""`index.html` in a real browser: loads quickly and without complaint, every tab works by click and by keyboard, and
nothing overflows on a phone.
"""

import shutil
from pathlib import Path

import pytest
from sidestream.compiler.cost.kernel_resources import Resources
from sidestream.compiler.cost.timings import Timings
from support.browser import Browser
from support.dumped import DECODE, compiled_on_meta, data_of
from support.meta import FIELDS
from support.page_checks import cut_off, poor_contrast, prefer, small_targets

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


def test_the_page_shows_its_overview_and_asks_for_nothing(window: Browser, page: Path) -> None:
    window.open(page)
    assert "8 layers" in window.run("return document.querySelector('h1').textContent")
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


def test_a_kernel_in_the_schedule_tells_its_cost(opened: Browser, page: Path) -> None:
    opened.click("#tab-schedule")
    lanes = opened.run(
        "return [...document.querySelectorAll('.step')].map((step) => [step.ariaLabel, step.offsetLeft, "
        "step.offsetTop, step.offsetHeight])"
    )
    steps = [step for step in data_of(page.read_text())["programs"][0]["steps"] if step["layer"] == "0"]
    assert len(lanes) == len(steps) and len({left for _, left, _, _ in lanes}) == 2
    waits = opened.run("return document.querySelectorAll('path.wait').length")
    assert waits == sum(len(step["waits"]) for step in steps) > 3
    heights = {text.split()[1].rstrip(","): height for text, _, _, height in lanes}
    assert heights["rope_append"] < heights["paged_attention_quant"]
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
    assert opened.run("return document.querySelectorAll('.step').length") > 100


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
        assert poor_contrast(opened) == [], name


def test_nothing_is_cut_off_on_a_phone(opened: Browser) -> None:
    opened.size(390, 844, phone=True)
    for name in TABS:
        opened.click(f"#tab-{name}")
        assert cut_off(opened) == [], name
        assert small_targets(opened, but=".step, .more") == [], name
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
        ("ops.elementwise.rms_norm._rms_norm_kernel", {"registers": 37, "spills": 0, "shared_bytes": 1088, "warps": 16})
    ]
    refused = {"sidestream.rope_append": "CompilationError: no <reason>"}
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
        next(step.index for step in steps if step.op == "sidestream.rope_append"),
    )
    assert "not compiled: CompilationError: no <reason>" in window.run(facts)
    window.run("state.op = 'sidestream.rms_norm_quant'; openTab('kernels'); changed('op')")
    shown = window.run("return document.querySelector('#panel-kernels').innerText")
    assert "37 registers" in shown and "for sm_90" in shown
    window.run("state.op = 'sidestream.linear_8bit'; changed('op')")
    assert "not launched by this program" in window.run("return document.querySelector('#panel-kernels').innerText")


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
