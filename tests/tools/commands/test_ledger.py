"""`sidestream inspect ledger` as a user sees it."""

import re
from pathlib import Path

import pytest
from sidestream.compiler.pipeline import PASSES
from sidestream.tools import cli
from sidestream.tools.commands.dump import read_ledger
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    base = tiny_llama(tmp_path_factory.mktemp("ledger"), tokenizer=True)
    return base.path, tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=20, targets=("q_proj", "v_proj"))])


def run(model: tuple[Path, list[Path]], *arguments: str) -> int:
    path, (first, second) = model
    return cli.main(["inspect", "ledger", str(path), "--lora-modules", f"one={first}", f"two={second}", *arguments])


def test_table_and_json_name_the_pass_that_adds_most(
    model: tuple[Path, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "ledger.json"
    assert run(model, "-p", "To be or not to be", "-p", "x" * 70, "--json", str(target)) == 0
    shown = capsys.readouterr().out
    assert "6 prompts, 264 tokens, adapters: one, two" in shown and "most is added by quantize_linears" in shown
    assert re.search(r"^quantize_linears +quantizes +9 ", shown, re.MULTILINE), shown
    assert re.search(r"^quantize_linears +\d (base|one|two)\[\d+\] '.*' +layer \d", shown, re.MULTILINE), shown
    assert max(map(len, shown.partition("written to")[0].splitlines())) <= 100
    found = read_ledger(target)
    assert max(found, key=found.__getitem__) == "quantize_linears" and "(program)" not in found


def test_the_reference_may_be_the_model_in_fp32(
    model: tuple[Path, list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "-p", "To be", "--reference", "fp32", "--precision", "bf16", "--disable-pass", "lift_lora") == 0
    shown = capsys.readouterr().out
    assert "(capture)" in shown and "lift_lora" not in shown
    totals = [
        float(line.split()[4]) for line in shown.splitlines() if re.match(r"\w+ +(keeps|quantizes|lowers) ", line)
    ]
    assert len(totals) == len(PASSES) - 1 and all(1e-4 < total < 0.2 for total in totals), shown


def test_an_empty_prompt_is_refused(model: tuple[Path, list[Path]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "-p", "") == 2
    assert "--prompt" in capsys.readouterr().err
