"""`sidestream eval --smoke` on the demo model: bounds that the default configuration must keep."""

import json
from pathlib import Path
from typing import Any

import pytest
from sidestream.tools.cli import main
from sidestream.tools.commands import eval as command
from support.installed import once

# over all adapters; measured on the demo model: 2.6e-4, 0.98, 1.000
MEAN_KL, TOP_1, PERPLEXITY_RATIO = 1e-3, 0.97, 1.005


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Any]:
    """Half of the texts and questions; with --exhaustive all."""

    def measure(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patched:
            if not pytestconfig.getoption("--exhaustive"):
                patched.setattr(command, "SMOKE_TASKS", command.SMOKE_TASKS // 2)
                patched.setattr(command, "SMOKE_DOCUMENTS", command.SMOKE_DOCUMENTS // 2)
            arguments = ["eval", "--smoke", "--device", "cpu", "--output-json", str(folder / "eval.json")]
            assert main(arguments) == 0

    found: dict[str, Any] = json.loads((once(tmp_path_factory, "eval_smoke", measure) / "eval.json").read_text())
    return found


def weighted(arm: dict[str, Any], figure: str) -> float:
    tokens = [each["tokens"] for each in arm["divergences"]]
    return sum(each[figure][0] * count for each, count in zip(arm["divergences"], tokens, strict=True)) / sum(tokens)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_defaults_stay_close_to_bf16(found: dict[str, Any], name: str) -> None:
    (arm,) = (arm for arm in found["arms"] if arm["arm"] == name)
    assert {each["adapter"] for each in arm["divergences"]} == {"base", "json", "pirate", "shout", "yoda"}
    assert 1e-9 < weighted(arm, "mean_kl") <= MEAN_KL
    assert weighted(arm, "top_1") >= TOP_1
    assert weighted(arm, "perplexity_ratio") <= PERPLEXITY_RATIO
    assert arm["pooled"]["reference"] >= 0.95 and arm["pooled"]["worse"] <= 1


def test_the_json_has_the_load_and_all_arms(found: dict[str, Any]) -> None:
    assert (found["suite"], found["errors"]) == ("the demo's facts", {})
    assert found["again"]["arm"] == "bf16 again" and [arm["arm"] for arm in found["arms"]] == ["int8", "fp8"]
