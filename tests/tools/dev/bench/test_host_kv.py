"""The bench of KV pages in host memory: what it prints of a tiny model."""

import json
from pathlib import Path

from sidestream.tools.dev.bench.host_kv import main
from sidestream.tools.options.models import LLAMA_8B

from .test_activated_lora import TINY


def test_long_prompts_are_found_where_they_should_be(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **TINY, "head_dim": 64, "rope_scaling": None}))
    arguments = ["--shape", str(tmp_path), "--prompt-len", "256", "--others", "2", "--arrivals", "4", "--rounds", "1"]
    main([*arguments, "--kv-host-gb", "0.1", "--device", "cpu", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    cached = {place: values["cached"] for place, values in found["first_token"].items()}
    assert cached == {"computed": 0, "device": 256, "host": 256}
    assert found["decode"]["pages_loaded"] >= 4 and found["decode"]["steps_without"] > 0
