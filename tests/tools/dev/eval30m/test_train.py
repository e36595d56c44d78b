"""The training script at its smallest: what it writes is read by sidestream, by transformers and by peft."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from sidestream.tools.dev.eval30m.tasks import TASKS
from support.installed import once


def train(*arguments: str) -> int:
    """The script. It imports transformers and peft, which takes seconds."""
    from sidestream.tools.dev.eval30m.train import main

    return main(list(arguments))


def train_all(directory: Path) -> None:
    assert train("-o", str(directory), "--smoke") == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "quality", train_all)


def test_every_task_has_its_adapter_and_together_they_differ_in_all_that_matters(trained: Path) -> None:
    from sidestream.tools.dev.eval30m.train import ADAPTERS

    configs = {
        path.parent.name: json.loads(path.read_text()) for path in trained.glob("adapters/*/adapter_config.json")
    }
    assert set(configs) == set(TASKS) == set(ADAPTERS) and len(configs) >= 6
    assert {rank for config in configs.values() for rank in (config["r"], *config["rank_pattern"].values())} >= {
        8,
        16,
        32,
        64,
    }
    assert [config["use_rslora"] for config in configs.values()].count(True) == 1
    assert any(config["rank_pattern"] and config["alpha_pattern"] for config in configs.values())
    assert {len(config["target_modules"]) for config in configs.values()} >= {4, 7}
    assert {config["base_model_name_or_path"] for config in configs.values()} == {"sidestream-quality"}, (
        "no path of the machine that trained it"
    )


def test_the_report_has_the_digest_of_every_model(trained: Path) -> None:
    report = json.loads((trained / "report.json").read_text())
    assert set(report["tasks"]) == set(TASKS)
    weights = {"base": report["digest"], **{name: each["digest"] for name, each in report["tasks"].items()}}
    for name, found in weights.items():
        [path] = (trained / ("base" if name == "base" else f"adapters/{name}")).glob("*.safetensors")
        assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(found) and len(found) == 16


def test_the_same_seed_makes_the_same_models(trained: Path, tmp_path: Path) -> None:
    assert train("-o", str(tmp_path), "--smoke") == 0
    weights = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert len(weights) == 1 + len(TASKS)
    for path, content in weights.items():
        assert content == (trained / path).read_bytes(), path


def test_the_arms_run_over_all_tasks(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sidestream.tools.dev.eval30m.__main__ import main

    sizes = ["--tasks", "2", "--documents", "2", "--needles", "1", "--max-length", "1024", "--arms", "fp8"]
    assert main([str(trained), *sizes, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "fp8: " in shown and "needle 1024 tokens, depth 0.25" in shown and "sample: undecided" in shown


def test_sidestream_answers_as_transformers_and_peft_do(trained: Path) -> None:
    from peft import PeftModel
    from sidestream import LLM, SamplingParams
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(trained / "base" / "tokenizer.json"))
    prompt = "# compute\n12+34 =>"
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    llm = LLM(
        str(trained / "base"),
        adapters={name: str(trained / "adapters" / name) for name in TASKS},
        precision="fp32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_loras=8,
        max_lora_rank=64,
        enforce_eager=True,
        show_progress=False,
    )
    names = [None, *TASKS]
    answers = llm.generate(
        [prompt] * len(names), SamplingParams(max_tokens=6, temperature=0.0), adapter=names, use_tqdm=False
    )
    for name, answer in zip(names, answers, strict=True):
        model = LlamaForCausalLM.from_pretrained(trained / "base", dtype=torch.float32)
        if name:
            model = PeftModel.from_pretrained(model, str(trained / "adapters" / name))
        expected = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=1
        )[0, ids.shape[1] :]
        assert list(answer.outputs[0].token_ids) == expected.tolist()[: len(answer.outputs[0].token_ids)], name
