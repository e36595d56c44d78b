"""The tables of README.md and docs/ are those of the raw measurements and of the cost model."""

import json
import re
from pathlib import Path

import pytest
from sidestream.tools.dev.pages.tables import (
    LLAMAS,
    MEASURED,
    MEASUREMENTS,
    RANK,
    ROOT,
    WRITERS,
    TableError,
    blocks,
    main,
    pages,
    parallel,
    rewritten,
    sizes,
)
from sidestream.tools.options.models import LLAMA_8B

WRITE = "run `python -m sidestream.tools.dev.pages.tables --write`"


def shown(name: str) -> str:
    """The text of a table, on the first page that has it."""
    return next(found[name] for page in pages() if name in (found := blocks(page.read_text())))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_measured_tables_are_those_of_the_raw_output(page: Path) -> None:
    found = blocks(page.read_text())
    assert set(found) <= set(WRITERS)
    for name in set(found) & set(MEASURED):
        assert found[name] == MEASURED[name](), f"{name}: {WRITE}"


def test_each_measured_table_is_on_a_page_and_has_at_most_twelve_rows() -> None:
    for name in MEASURED:
        assert 2 < len(shown(name).splitlines()) <= 2 + 12, name


def test_the_latency_table_has_the_raw_figures() -> None:
    for row in json.loads((MEASUREMENTS / "bench_latency_h200.json").read_text())["rows"]:
        assert f"| {row['ms_per_step']:.2f} |" in MEASURED["latency"]()


def test_the_prompts_of_an_h100_have_the_raw_figures_of_this_release() -> None:
    raw = (MEASUREMENTS / "prompts_h100.txt").read_text().partition("== release")[0]
    rates = [f"{int(rate):,}" for rate in re.findall(r"^P +16 \w+ +\d+ +(\d+)", raw, re.MULTILINE)]
    assert len(rates) == 2
    assert all(rate in MEASURED["prompts"]() for rate in rates)


def rows_under(heading: str, page: str) -> list[list[str]]:
    """The rows of the first table under a heading, without head and rule."""
    part = (ROOT / "docs" / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def test_the_time_of_each_op_is_that_of_the_raw_output() -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for result in json.loads((MEASUREMENTS / "steps_h200.json").read_text())["results"]:
        if re.match(r"decode_t(1|64|256)_.*_lora$", result["program"]):
            layers = max(row["count"] for row in result["rows"] if row["op"].startswith("paged_attention"))
            for row in result["rows"]:
                found.setdefault((row["op"], row["lane"]), []).append(f"{row['measured'] / layers:.1f}")
    rows = rows_under("Time of a layer by op", "experiments.md")
    assert len(rows) > 5
    for op, lane, *cells in rows:
        assert cells == found[op.partition(" (")[0].replace("`", ""), lane], op


def test_attention_has_the_raw_figures() -> None:
    raw = json.loads((MEASUREMENTS / "bench_attention_h200.json").read_text())["attention"]
    rows = rows_under("Attention alone", "experiments.md")
    assert len(rows) > 5
    for shape, *cells in rows:
        found = {row["cache"]: row for row in raw if f"{row['kind']} {row['shape']}" == shape}
        for cache, cell in zip(("fp8_e4m3", "int8", "bf16"), cells, strict=True):
            row = found[cache]
            decode = f"{row['us']:.1f} us, {row['share'] or 0:.0%}"
            assert cell == (decode if row["kind"] == "decode" else f"{row['us']:.0f} us, {row['rate']:.0f} TFLOP/s")


def test_first_traffic_has_the_raw_figures() -> None:
    raw = (MEASUREMENTS / "first_traffic_h100.txt").read_text()
    today, former = raw.partition("== the same server")[0], raw.partition("== release 0.2.0")[2]
    for count, *cells in rows_under("First traffic", "performance.md"):
        line = rf"^first: {count} at once .*first token +(\S+) median .*gap +(\S+) longest"
        assert cells == [cell for text in (today, former) for cell in re.findall(line, text, re.MULTILINE)[0]]


def test_a_changed_figure_is_reported_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: startup -->\n| made up |\n<!-- end -->\nafter\n")
    assert main([str(page)]) == 1
    assert "-| made up |" in capsys.readouterr().out
    assert main([str(page), "--write"]) == 0 and main([str(page)]) == 0
    assert page.read_text().startswith("before\n") and page.read_text().endswith("\nafter\n")
    with pytest.raises(TableError, match="unknown table or excerpt 'prices'"):
        rewritten("<!-- table: prices -->\n<!-- end -->\n", WRITERS)


def test_figures_of_the_ablation_on_other_pages() -> None:
    rows = json.loads((MEASUREMENTS / "bench_ablation_h200.json").read_text())["ablation"]
    us = {(row["arm"], row["tokens"], bool(row["adapters"])): row["us_per_layer"] for row in rows}
    tokens = sorted({place[1] for place in us})

    def span(longer: str, adapters: bool, over: bool) -> list[float]:
        return sorted(us[longer, count, adapters] / us["everything on", count, over] for count in tokens)

    serial, side = span("LoRA as serial", True, False), span("everything on", True, False)
    slow, fast = (f"{times[0] * 100 - 100:.0f} to {times[-1] - 1:.0%} longer" for times in (serial, side))
    for page in (ROOT / "docs" / "how_it_works.md", ROOT / "README.md"):
        assert slow in page.read_text() and fast in page.read_text()
    wide = sorted(span("everything in 16 bits", False, False) + span("everything in 16 bits", True, True))
    assert f"takes {wide[0]:.1f} to {wide[-1]:.1f} times as long" in (ROOT / "docs" / "tuning.md").read_text()


def test_the_share_of_adapters_on_the_tuning_page() -> None:
    shares = sorted(line.split("|")[-2].strip() for line in MEASURED["latency"]().splitlines()[2:])
    least, most = (share.removeprefix("0.") for share in (shares[0], shares[-1]))
    text = (ROOT / "docs" / "tuning.md").read_text()
    assert f"a GPU gives {least} to {most}% of the tokens per second" in text


def test_a_row_of_several_gpus_is_what_the_cost_model_computes() -> None:
    assert parallel(["Llama 3.1 8B"], [2]).splitlines()[-1] in shown("parallel"), WRITE


def test_ranks_share_weights_and_answer_one_request_sooner() -> None:
    for model in ("8B", "70B"):
        row = rf"\| Llama 3.1 {model} \| [248] \| (\S+) / (\S+) \| (\S+) / (\S+) \| (\S+) / (\S+) "
        rows = re.findall(row, shown("parallel"))
        assert len(rows) == 3
        for found in rows:
            weights, whole, room, spread, step, alone = map(float, found)
            assert weights < whole and room > spread and step < alone


def test_the_smallest_model_s_sizes_are_what_the_engine_counts() -> None:
    assert sizes([next(iter(LLAMAS))]).splitlines()[-1] in shown("sizes"), WRITE


@pytest.mark.parametrize("name", list(LLAMAS)[:3])
def test_the_sizes_are_those_of_the_config(name: str) -> None:
    """Counted by hand: parameters, one byte each in a linear, two in an embedding; keys and values of one byte."""
    each = {**LLAMA_8B, **LLAMAS[name]}
    hidden, layers, heads = each["hidden_size"], each["num_hidden_layers"], each["num_key_value_heads"]
    query, key = each["num_attention_heads"] * each["head_dim"], heads * each["head_dim"]
    linears = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    linears += [(hidden, each["intermediate_size"])] * 3
    embedding = each["vocab_size"] * hidden
    inner = layers * sum(a * b for a, b in linears)
    copies = 1 if each["tie_word_embeddings"] else 2
    row = re.search(rf"\| {name} \| (.*) GB \| (.*) GB \| (.*) MB \| (.*) MB \|", shown("sizes"))
    assert row is not None
    checkpoint, weights, cache, slot = map(float, row.groups())
    assert abs(checkpoint - 2e-9 * (inner + copies * embedding)) < 0.06
    assert abs(weights - 1e-9 * (inner + 3 * embedding)) < 0.06  # the head in int8 is a copy of its own
    assert abs(cache - 1e-3 * layers * heads * 2 * each["head_dim"]) < 0.07 * cache  # and their scales
    assert slot > 1e-6 * layers * RANK * sum(a + b for a, b in linears)
