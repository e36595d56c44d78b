"""Quality of a small mixture of experts: both models are trained and read, and a router in int8 chooses others."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sidestream.ops.moe.route import moe_route
from support.moe_samples import router_inputs


@pytest.fixture
def threads() -> Iterator[None]:
    """The script sets their number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_both_models_are_trained_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sidestream.tools.dev.eval30m.mixture import PRECISIONS, main

    sizes = ["--smoke", "--documents", "1", "--tasks", "2", "--threads", "1"]
    failed = main(["-o", str(tmp_path), *sizes])
    configs = {
        name: json.loads((tmp_path / name / "base" / "config.json").read_text()) for name in ("mixture", "dense")
    }
    mixture = configs["mixture"]
    assert mixture["num_experts_per_tok"] * mixture["moe_intermediate_size"] == configs["dense"]["intermediate_size"]
    with safe_open(tmp_path / "mixture" / "adapters" / "strings" / "adapter_model.safetensors", "pt") as file:
        names = " ".join(file.keys())
    assert all(part in names for part in ("q_proj", "mlp.experts.base_layer.lora_A", "mlp.gate.lora_B"))
    shown = capsys.readouterr().out
    for model, arms in (("mixture", list(PRECISIONS)), ("dense", ["fp32", "int8"])):
        read = [line for line in shown.splitlines() if line.startswith(f"{model}  ")]
        assert len(read) == 3 * len(arms), "the base and two adapters"
        assert all(f"\n{model}, {arm}:\n" in shown for arm in arms)
    about = [line for line in shown.splitlines() if "tokens with other experts in the worst layer: " in line]
    assert len(about) == len(PRECISIONS)
    assert (": missed, " in about[-1]) == (failed == 0), "a control that passes is a failure"


def test_a_router_in_int8_chooses_other_experts_for_some_tokens() -> None:
    from sidestream.tools.dev.eval30m.mixture import route_in_int8

    inputs = router_inputs(400, 64, 16, 4, True, delta=True, padding=3)
    (experts, weights), (rounded, others) = moe_route.reference(*inputs), route_in_int8(*inputs)
    same = (experts.sort(1).values == rounded.sort(1).values).all(1)
    assert 0.7 < float(same.float().mean()) < 0.99
    assert bool((rounded[-3:] == -1).all()) and bool((others[-3:] == 0).all())
    torch.testing.assert_close(others[:-3].sum(1), weights[:-3].sum(1))
