"""What a person meets who opens `index.html` for the first time: no unused kernel, no unexplained figure, nothing that
is hidden.
"""

from pathlib import Path

import pytest
from sidestream.compiler.cost.timings import Timings
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.pipeline import pass_names
from sidestream.graphs.lora import LoraShape
from support.browser import Browser
from support.dumped import DECODE, data_of
from support.meta import FIELDS, compiled_without_weights
from support.page_checks import nameless_controls

TEXT = "return document.querySelector(arguments[0]).innerText"
TABS = ("overview", "passes", "schedule", "memory", "kernels")
CHOOSE = """
const choice = document.getElementById('program');
choice.value = arguments[0];
choice.dispatchEvent(new Event('change'));"""
ENDS = """
const box = document.querySelector(arguments[0]).parentNode;
return (async () => {
  await new Promise((done) => setTimeout(done, 100)); // a frame or more: the page looks after it was drawn
  return ['on-left', 'on-right'].map((end) => box.classList.contains(end));
})()"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, compiled without one of the passes, with times that were measured on a CPU."""
    options = CompileOptions(disable=("pack_projections",))
    compiled = compiled_without_weights(
        FIELDS | {"num_hidden_layers": 1}, LoraShape(8, 16), options, options.model_dtype, text=True
    )
    steps = {DECODE.name: [(1e-3 * index, 1e-3 * index + 9e-4) for index in range(len(compiled.program(DECODE).steps))]}
    timings = Timings(steps=steps, device="cpu")
    root = tmp_path_factory.mktemp("small")
    return compiled.dump(root, [DECODE], timings=timings, show_timings=True) / "index.html"


def test_kernels_open_on_what_takes_most_of_this_program(opened: Browser, page: Path) -> None:
    opened.click("#tab-kernels")
    assert (
        opened.run("return document.querySelector('.oplist [aria-pressed=true]').dataset.op")
        == "sidestream.linear_8bit"
    )
    first = opened.run("return document.querySelector('#panel-kernels details[open] summary').innerText")
    assert "_linear_8bit_tma" in first and "launched 33 times" in first
    calls = {step["op"] for step in data_of(page.read_text())["programs"][0]["steps"]}
    listed = opened.run("return [...document.querySelectorAll('.oplist button')].map((button) => button.dataset.op)")
    called = [op in calls for op in listed]
    assert called == sorted(called, reverse=True) and not all(called), "those of other programs come last"
    assert "in other programs:" in opened.run(TEXT, ".oplist")
    unused = next(op for op in listed if op not in calls)
    opened.run(f"document.querySelector('[data-op=\"{unused}\"]').click()")
    assert "This program does not call it." in opened.run(TEXT, "#panel-kernels")
    opened.run(CHOOSE, 1)
    assert "This program does not call it." not in opened.run(TEXT, "#panel-kernels")


def test_a_step_names_the_kernels_that_it_launches(opened: Browser) -> None:
    opened.click("#tab-schedule")
    opened.run("document.querySelector('.step[aria-label*=\"paged_attention\"]').click()")
    assert "decode_kernel, then _quantize_kernel" in opened.run(TEXT, "#panel-schedule aside")
    opened.run(CHOOSE, 1)
    opened.run("document.querySelector('.step[aria-label*=\"paged_attention\"]').click()")
    assert "prefill_kernel, then _quantize_kernel" in opened.run(TEXT, "#panel-schedule aside")


def test_the_two_counts_of_kernels_are_explained(opened: Browser, page: Path) -> None:
    data = data_of(page.read_text())
    graph, own = data["passes"][-1]["kernels"][1], len(data["programs"][0]["steps"])
    assert graph != own
    assert f"passes of its own: {graph} → {own}" in opened.run(TEXT, ".figures")
    opened.click(".figures button.link")
    told = opened.run("return document.querySelector('#panel-passes details[open]').innerText")
    assert f"{graph} → {own} kernels" in told and "Compared with the graph:" in told and "fuse_lora_silu_mul" in told
    difference = next(line for line in told.splitlines() if line.startswith("Compared"))
    signed = [part.replace("−", "-").split()[0] for part in difference.split(": ")[1].split(". ")[0].split(", ")]
    assert sum(map(int, signed)) == own - graph, "the changes add up to the difference"
    assert opened.run("return document.activeElement.tagName") == "SUMMARY"


def test_passes_that_are_off_say_so(window: Browser, small: Path) -> None:
    window.size(1360, 900)
    window.open(small)
    told = {"pack_projections": "disable_passes=pack_projections", "center_keys": "center_keys=False"}
    window.click("#tab-passes")
    names = window.run("return [...document.querySelectorAll('.pass')].map((pass) => pass.dataset.pass)")
    assert [name for name in names if name in pass_names()] == [name for name in pass_names() if name in names]
    for name, reason in told.items():
        assert reason in window.run(TEXT, f'[data-pass="{name}"].off')
        window.run(f"document.querySelector('[data-pass=\"{name}\"]').click()")
        assert f"It is off: {reason}." in window.run(TEXT, "#panel-passes")
    window.click("#tab-overview")
    assert "Switched off by options: rotate_values" in window.run(TEXT, "#panel-overview")
    assert f"({len(window.run('return DATA.passes.filter((pass) => pass.off)'))} off)" in window.run(TEXT, "header")


def test_a_share_of_the_floor_that_size_explains_is_explained(opened: Browser, small: Path) -> None:
    assert "of the floor's speed" in opened.run(TEXT, ".figures")
    assert "has little to read" not in opened.run(TEXT, "#panel-overview")
    opened.open(small)
    shown = opened.run(TEXT, "#panel-overview")
    assert "Why <1% of the floor's speed: this program has little to read." in shown or "Why 1% of the floor" in shown


def test_a_cpus_times_are_not_held_against_a_gpus_floor(window: Browser, small: Path) -> None:
    window.open(small)
    shown = window.run(TEXT, "#panel-overview")
    assert "measured kernel by kernel on cpu" in shown and "shares of the floor are those of the estimates" in shown
    shares = window.run(
        "return program().steps.map((step, index) => [ofFloor(program(), index).share, step.floor / step.alone])"
    )
    assert all(share == estimated for share, estimated in shares)


@pytest.mark.parametrize("width", [390, 1360])
def test_the_strip_shows_that_it_goes_on(opened: Browser, width: int) -> None:
    opened.size(width, 844, phone=width == 390)
    opened.click("#tab-passes")
    strip = "#panel-passes .strip"
    assert opened.run(ENDS, strip) == [False, True]
    opened.click("#panel-passes .strip ~ .more.right")
    assert opened.run("return document.querySelector(arguments[0]).scrollLeft", strip) > 100
    opened.run("document.querySelector(arguments[0]).scrollLeft = 1e6", strip)
    assert opened.run(ENDS, strip) == [True, False]


def test_tables_scroll_on_a_phone_and_show_it(opened: Browser) -> None:
    assert opened.run(ENDS, "#panel-overview .scroll") == [False, False]
    opened.size(390, 844, phone=True)
    assert opened.run(ENDS, "#panel-overview .scroll") == [False, True]


def test_a_kernel_chosen_on_a_phone_comes_into_view(opened: Browser) -> None:
    opened.size(390, 844, phone=True)
    opened.click("#tab-schedule")
    opened.run("document.querySelector('.step').click()")
    assert opened.run(
        "return document.querySelector('#panel-schedule aside').getBoundingClientRect().top < innerHeight"
    )


def test_tab_goes_through_the_page_in_reading_order(opened: Browser) -> None:
    opened.run("document.activeElement.blur()")
    where = "const node = document.activeElement; return node.id || node.getAttribute('aria-label') || node.textContent"
    seen = []
    for _ in range(8):
        opened.press("Tab")
        seen.append(opened.run(where))
    assert seen[:4] == ["program", "theme", "tab-overview", "panel-overview"]
    assert seen[4].startswith("passes of its own") and seen[6:] == ["previous layer", "next layer"]


def test_every_control_has_a_name(opened: Browser) -> None:
    for name in TABS:
        opened.click(f"#tab-{name}")
        assert nameless_controls(opened) == [], name
