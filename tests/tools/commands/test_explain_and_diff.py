"""`sidestream inspect explain` and `sidestream inspect diff` as a user sees them."""

import json
from pathlib import Path

import pytest
from sidestream.compiler.cost import hardware
from sidestream.compiler.cost.hardware import H100
from sidestream.compiler.inspect import explain
from sidestream.compiler.options import DEFAULT_PRECISION
from sidestream.tools import cli
from support.meta_model import config_directory


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


@pytest.fixture
def few_changes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some changes are compiled (with --exhaustive all); tests of `what_ifs` compile them all."""
    every = explain._variants
    few = {"no adapter in the batch", "lora_lowering=serial", "pdl=False", "without fuse_rope_append"}
    if not request.config.getoption("--exhaustive"):
        monkeypatch.setattr(explain, "_variants", lambda *of: (each for each in every(*of) if each[0] in few))


@pytest.mark.usefixtures("few_changes")
def test_explain_needs_a_config_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config_directory(tmp_path / "model", num_hidden_layers=3)
    assert (
        run(
            "explain",
            "--shape",
            str(model),
            "--max-loras",
            "2",
            "--bucket",
            "decode:4",
            "--context",
            "100",
            "--gpu",
            "H100",
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "decode_t4_b4_p8_lora, 100 cached tokens" in shown and "Estimates for H100" in shown
    assert (
        "pack_projections" in shown
        and "9 main and 8 side in each of 3 layers" in shown
        and "lora_lowering=serial" in shown
    )


def test_explain_of_ranks_shows_what_goes_over_nvlink(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config_directory(tmp_path / "model")
    bucket = ["--bucket", "mixed:2048", "--no-changes"]
    for ranks in ("1", "2"):
        assert run("inspect", "explain", str(model), *bucket, "--tensor-parallel-size", ranks) == 0
        shown = capsys.readouterr().out
        assert ("NVLink MB" in shown) == ("MB over NVLink in" in shown) == (ranks == "2")
    assert "all_gather" not in shown, "an engine's ranks keep their part of the logits"
    heads = next(line for line in shown.splitlines() if "NVLink MB" in line)
    values = next(line for line in shown.splitlines() if line.startswith("all_reduce_add_rms_norm_quant "))
    end = heads.index("NVLink MB") + len("NVLink MB")
    assert float(values[:end].split()[-1]) > 0.0 and float(values[end:].split()[1]) > 0.0, "bytes, and their floor"


def test_explain_estimates_for_the_gpu_that_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        "inspect",
        "explain",
        str(config_directory(tmp_path / "model")),
        "--json",
        "--bucket",
        "decode:2",
        "--no-changes",
    )
    found = {}
    for name, here in {"none": None, "H100": H100}.items():
        if here is not None:
            monkeypatch.setattr(hardware, "gpu_here", lambda: H100)
        assert run(*command) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert found["none"]["gpu"]["name"] == "H200" and "assumed" in found["none"]["gpu"]["source"]
    assert found["H100"]["gpu"] == H100.to_json() and found["H100"]["gpu"]["bytes_per_second"] == pytest.approx(3.03e12)
    slow, fast = (found[name]["programs"][0]["floor_us"] for name in ("H100", "none"))
    assert slow == pytest.approx(fast * 4.68 / 3.03, rel=1e-3)


def test_explain_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config_directory(tmp_path / "model")
    assert run("inspect", "explain", str(model), "--json", "--bucket", "decode:2", "mixed:64", "--no-changes") == 0
    facts = json.loads(capsys.readouterr().out)
    assert [program["program"] for program in facts["programs"]] == ["decode_t2_b2_p8_base", "mixed_t64_b8_p8_base"]
    assert facts["changes"]["found"] == [] and facts["options"]["precision"] == DEFAULT_PRECISION
    assert {entry["name"] for entry in facts["passes"]} > {"normalize", "quantize_linears"}


@pytest.mark.usefixtures("few_changes")
def test_a_deep_models_changes_follow_from_two_cuts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config_directory(tmp_path / "model", num_hidden_layers=5)
    assert run("inspect", "explain", str(model), "--json", "--bucket", "decode:4") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["changes"]["now_us"] == pytest.approx(facts["programs"][0]["estimated_us"], rel=1e-6), (
        "two and a layer more tell the whole"
    )
    assert {change["change"] for change in facts["changes"]["found"]} >= {"pdl=False", "without fuse_rope_append"}


def test_a_longer_context_takes_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config_directory(tmp_path / "model", num_key_value_heads=2)
    times = []
    for context in ("64", "100000"):
        assert (
            run(
                "inspect",
                "explain",
                str(model),
                "--json",
                "--no-changes",
                "--bucket",
                "decode:64",
                "--context",
                context,
            )
            == 0
        )
        times.append(json.loads(capsys.readouterr().out)["programs"][0]["estimated_us"])
    assert times[1] > 2 * times[0]


@pytest.mark.parametrize(("arguments", "message"), [
    (["x", "--shape", "llama-3.1-8b"], "name two models"), (["no/such/place"], "no config.json"),
    (["--gpu", "A100"], "no figures for 'A100'"),
    (["--disable-pass", "nope"], "'fold_multipliers', 'rotate_values', 'smooth_channels'"),
])  # fmt: skip
def test_explain_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "explain", *arguments) == 2
    assert message in capsys.readouterr().err


def test_diff_tells_what_a_pass_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(config_directory(tmp_path / "model"))
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert run("inspect", "dump", model, "-o", first, "--bucket", "decode:2") == 0
    assert run("inspect", "dump", model, "-o", second, "--bucket", "decode:2", "--disable-pass", "fuse_silu_mul") == 0
    capsys.readouterr()
    assert run("inspect", "diff", first, second) == 1
    shown = capsys.readouterr().out
    assert "fuse_silu_mul: only in the first dump" in shown and "estimated us" in shown
    assert run("inspect", "diff", first, second, "--json") == 1
    assert json.loads(capsys.readouterr().out)["options"]["disable"] == [[], ["fuse_silu_mul"]]
    assert run("inspect", "diff", first, first) == 0
    assert run("inspect", "diff", first, str(tmp_path)) == 2


def test_a_dump_has_programs_with_cascade_attention(tmp_path: Path) -> None:
    fields = json.loads((config_directory(tmp_path / "model") / "config.json").read_text())
    wide = fields | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
    (tmp_path / "model" / "config.json").write_text(json.dumps(wide))
    buckets = ("--bucket", "decode:128", "cascade:128")
    assert run("inspect", "dump", str(tmp_path / "model"), "-o", str(tmp_path / "dump"), *buckets) == 0
    programs = {path.parent.name: path.read_text() for path in (tmp_path / "dump").glob("*/program.txt")}
    shared = {name.split("_b128_")[1] for name, text in programs.items() if "sidestream.prefix_attention" in text}
    assert len(programs) == 2 and shared == {"p8_base_cascade"}


def test_explain_says_what_drafts_would_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buckets = ("decode:8", "verify3:8", "verify7:8")
    assert (
        run(
            "inspect",
            "explain",
            str(config_directory(tmp_path / "model")),
            "--no-changes",
            "--json",
            "--bucket",
            *buckets,
        )
        == 0
    )
    programs = json.loads(capsys.readouterr().out)["programs"]
    assert [each["program"].split("_p")[0] for each in programs] == ["decode_t8_b8", "verify_t32_b8", "verify_t64_b8"]
    estimates = [each["estimated_us"] for each in programs]
    assert estimates[1] < estimates[2] < 8 * estimates[0]
