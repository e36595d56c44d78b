"""The bench of aLoRA's first token: what it prints of a tiny model."""

import json
import re
from pathlib import Path

import pytest
from sidestream.tools.dev.bench.activated_lora import main
from sidestream.tools.options.models import LLAMA_8B

TINY = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 1024,
}  # fmt: skip


def test_the_adapter_finds_the_base_s_pages_as_alora_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **TINY, "head_dim": 64, "rope_scaling": None}))
    arguments = ["--shape", str(tmp_path), "--prompt-len", "300", "--tail", "20", "--rounds", "1", "--rank", "4"]
    main([*arguments, "--device", "cpu"])
    (row,) = capsys.readouterr().out.splitlines()
    assert row.lstrip().startswith("300 tokens: lora ")
    assert [int(each) for each in re.findall(r"'cached': (\d+)", row)] == [0, 256]
