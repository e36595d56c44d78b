"""`sidestream eval --smoke` on the demo model: the bounds that the default configuration must keep, and the faults
that must be seen.
"""

import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from sidestream.tools.cli import main
from sidestream.tools.commands import eval as command
from support.installed import once

# over all adapters; measured on the demo model: 2.6e-4, 0.98, 1.000
MEAN_KL, TOP_1, PERPLEXITY_RATIO = 1e-3, 0.97, 1.005


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Half of the texts and questions; with --exhaustive all."""

    def measure(folder: Path) -> None:
        outputs = [
            "--output-json",
            str(folder / "eval.json"),
            "--plot",
            str(folder / "eval.svg"),
            "--markdown",
            str(folder / "eval.md"),
        ]
        with pytest.MonkeyPatch.context() as patched:
            if not pytestconfig.getoption("--exhaustive"):
                patched.setattr(command, "SMOKE_TASKS", command.SMOKE_TASKS // 2)
                patched.setattr(command, "SMOKE_DOCUMENTS", command.SMOKE_DOCUMENTS // 2)
            assert main(["eval", "--smoke", "--controls", "--device", "cpu", *outputs]) == 0

    return once(tmp_path_factory, "eval_smoke", measure)


@pytest.fixture(scope="module")
def arms(files: Path) -> dict[str, Any]:
    found = json.loads((files / "eval.json").read_text())
    assert [each["label"] for each in found["rounds"]] == ["clean"] and found["rounds"][0]["sound"]
    return {arm["arm"]: arm for arm in found["rounds"][0]["arms"]}


def weighted(arm: dict[str, Any], figure: str) -> float:
    tokens = [each["tokens"] for each in arm["divergences"]]
    return sum(each[figure][0] * count for each, count in zip(arm["divergences"], tokens, strict=True)) / sum(tokens)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_defaults_stay_close_to_bf16(arms: dict[str, Any], name: str) -> None:
    arm = arms[name]
    assert {each["adapter"] for each in arm["divergences"]} == {"base", "json", "pirate", "shout", "yoda"}
    assert 1e-9 < weighted(arm, "mean_kl") <= MEAN_KL
    assert weighted(arm, "top_1") >= TOP_1
    assert weighted(arm, "perplexity_ratio") <= PERPLEXITY_RATIO
    assert arm["pooled"]["reference"] >= 0.95 and arm["pooled"]["worse"] <= 1


def test_so_few_questions_never_make_a_claim(arms: dict[str, Any]) -> None:
    assert not any(arm["identical"] for arm in arms.values())


def test_planted_faults_are_caught_by_what_they_do_to_the_logits(arms: dict[str, Any]) -> None:
    for name in ("control-wrong-scale", "control-one-sided-hadamard"):
        missed = {
            condition["name"]
            for condition in arms[name]["conditions"]
            if condition["state"] == "missed" and condition["telling"]
        }
        assert arms[name]["failed"] and "mean KL at its upper bound" in missed


def test_the_page_names_the_gaps_and_the_plot_has_every_arm(files: Path, arms: dict[str, Any]) -> None:
    page, root = (files / "eval.md").read_text(), xml.etree.ElementTree.parse(files / "eval.svg").getroot()
    assert (
        "![Mean KL" in page
        and "(eval.svg)" in page
        and "fails, as it must" in page
        and "identical to bf16 (" not in page
    )
    titles = [str(title.text).partition(":")[0] for title in root.iter("{http://www.w3.org/2000/svg}title")]
    controls = {name for name, arm in arms.items() if arm["control"]}
    assert controls and sorted(titles) == sorted((set(arms) | {"bf16 again"}) - controls)
    words = " ".join(str(text.text) for text in root.iter("{http://www.w3.org/2000/svg}text"))
    assert f"Not shown: {len(controls)} control arms" in words and "int8 (default)" in words
