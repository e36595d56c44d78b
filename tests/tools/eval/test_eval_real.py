"""`sidestream eval --real`, here on the demo model: arms next to transformers and peft in fp32; the model's digest."""

import json
from pathlib import Path

import pytest
import torch
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.tools.cli import main
from sidestream.tools.eval.real.adapters import train_adapters
from sidestream.tools.eval.real.convert_gguf import check_digest, real_model
from sidestream.tools.eval.real.texts import LENGTH, SHORTEST, natural_documents


def test_arms_are_read_next_to_transformers_and_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "real.json"
    asked = ["--arms", "bf16,int8,peer-fp8-rowwise", "--tokens", "300", "--device", "cpu", "--jobs", "2"]
    (tmp_path / "adapters").mkdir()
    for name in ("pirate", "yoda"):
        (tmp_path / "adapters" / name).symlink_to(DEMO_MODEL / "adapters" / name)
    asked += ["--adapters", str(tmp_path / "adapters")]
    assert main(["eval", "--real", str(DEMO_MODEL), *asked, "--output-json", str(file)]) == 0
    found = json.loads(file.read_text())
    kl = {(arm["arm"], one["adapter"]): one["mean_kl"][0] for arm in found["arms"] for one in arm["divergences"]}
    for adapter in ("base", "pirate", "yoda"):
        assert 0 < kl["bf16", adapter] < kl["int8", adapter] < kl["peer-fp8-rowwise", adapter]
        assert kl["bf16", adapter] < 1e-3, "ours is the model that transformers and peft compute"
    shown = capsys.readouterr().out
    assert "compared with transformers in fp32" in " ".join(shown.split()) and "\npeer-fp8-rowwise " in shown


def test_documents_are_natural_text_of_one_length_for_all() -> None:
    documents = natural_documents(lambda text: list(text.encode()), 4096, (None, "sql"))
    base, other = ([each.tokens for each in documents if each.adapter == name] for name in (None, "sql"))
    assert base == other and 4096 <= sum(map(len, base)) < 4096 + LENGTH
    assert all(SHORTEST <= len(ids) <= LENGTH for ids in base)
    assert len({bytes(ids) for ids in base}) == len(base)


def test_another_file_is_not_taken_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "cache"))
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="sha256"):
        check_digest(other)
    for given, said in ((other, "sha256"), (tmp_path / "none", "neither a directory nor a file"), (tmp_path, "config")):
        with pytest.raises(ValueError, match=said):
            real_model(given)
    assert not list((tmp_path / "cache").rglob("conversion.json"))


def test_the_adapters_that_are_trained_can_be_served(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--exhaustive"):
        pytest.skip("three adapters are trained, half a minute; run with --exhaustive")
    config, device = LlamaConfig.from_directory(DEMO_MODEL), torch.device("cpu")
    written = train_adapters(DEMO_MODEL, tmp_path, device, steps=2, size=2)
    ranks = {name: load_adapter(path, config, 32).rank for name, path in written.items()}
    assert ranks == {"strings": 8, "sorting": 16, "json": 32}
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert train_adapters(DEMO_MODEL, tmp_path, device, steps=2, size=2) == written
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == stamps, "they stay"
