"""Tied models whose files hold an output head: as transformers loads them, whatever the family and the file."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream import LLM, SamplingParams
from sidestream.graphs.checkpoint import EMBEDDING, HEAD, Checkpoint, CheckpointError, checkpoint_config
from sidestream.graphs.llama import Llama
from support.families import tiny_family
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_llama

TOKENS = [5, 200, 17, 17, 90, 301, 44]


def rewrite(base: TinyBase, change: Any) -> TinyBase:
    """Change the tensors of a checkpoint of one file or of shards."""
    shards = sorted(base.path.glob("*.safetensors"))
    tensors = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    change(tensors)
    for path in shards:
        path.unlink()
    if len(shards) == 1:
        save_file(tensors, base.path / "model.safetensors", metadata={"format": "pt"})
        return base
    homes = {name: f"model-{1 + place % 3:05}-of-00003.safetensors" for place, name in enumerate(sorted(tensors))}
    for home in set(homes.values()):
        part = {name: tensor for name, tensor in tensors.items() if homes[name] == home}
        save_file(part, base.path / home, metadata={"format": "pt"})
    (base.path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return base


def own_head(tensors: dict[str, torch.Tensor]) -> None:
    """Differ in the last row only."""
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1] += 1.5


def same_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def head_alone(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def logits(base: TinyBase, adapters: list[Path]) -> torch.Tensor:
    model, _ = plain_model(base, adapters)
    return PagedRunner(model, 1).step([Chunk(0, TOKENS, 0)])[0]


@pytest.mark.parametrize("change", [own_head, same_head, head_alone])
@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen3", "smollm3", "granite", "phi3-narrow", "mistral"])
def test_heads_are_those_of_transformers(
    tmp_path: Path, family: str, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    base = rewrite(
        tiny_family(tmp_path, family, random.Random(3), tie_word_embeddings=True, num_hidden_layers=2), change
    )
    targets = ("o_proj",) if family.startswith("phi3") else ("q_proj", "down_proj")
    (adapter,) = tiny_adapters(base, [AdapterSpec(targets=targets)])
    with caplog.at_level(logging.WARNING, "sidestream.graphs"):
        config = checkpoint_config(base.path)
        checkpoint_config(base.path)
        torch.testing.assert_close(logits(base, [adapter]), oracle_logits(base, adapter, TOKENS), atol=1e-4, rtol=0)
    assert config.tie_word_embeddings is (change is not own_head)
    said = [record.getMessage() for record in caplog.records if record.name == "sidestream.graphs.checkpoint"]
    assert len(said) == (change is own_head), "once a process"
    assert all(f"{base.path}: config.json sets" in text for text in said)
    stored = Checkpoint(base.path, config)
    assert (EMBEDDING in stored) and stored.nbytes([EMBEDDING]) == config.vocab_size * config.hidden_size * 4


def test_heads_in_shards_and_in_another_dtype(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path, tie_word_embeddings=True, num_hidden_layers=1, max_shard_size="100KB")
    rewrite(base, own_head)
    torch.testing.assert_close(logits(base, []), oracle_logits(base, None, TOKENS), atol=1e-4, rtol=0)
    rewrite(base, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].to(torch.bfloat16)}))
    assert not checkpoint_config(base.path).tie_word_embeddings, "rounded, it is another one"
    rewrite(base, lambda tensors: tensors.update({EMBEDDING: tensors[HEAD].clone(), HEAD: tensors[HEAD].float()}))
    assert checkpoint_config(base.path).tie_word_embeddings


def test_a_head_of_another_shape_is_an_error(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    rewrite(base, lambda tensors: tensors.update({HEAD: torch.zeros(64, 128)}))
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight' has shape \[64, 128\], config.json implies \[320, 128\]"
    ):
        plain_model(base)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_answers_with_it(tmp_path: Path, ranks: int) -> None:
    base = tiny_llama(tmp_path, tie_word_embeddings=True, num_hidden_layers=1, num_key_value_heads=2, tokenizer=True)
    rewrite(base, lambda tensors: tensors.update({HEAD: torch.randn_like(tensors[EMBEDDING]) * 0.2}))
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    sizes: dict[str, Any] = {"device": "cpu", "precision": "fp32", "max_model_len": 64, "num_kv_pages": 4}
    with LLM(base.path, tensor_parallel_size=ranks, max_num_seqs=2, show_progress=False, **sizes) as llm:
        (output,) = llm.generate([TOKENS], params, use_tqdm=False)
    want = torch.log_softmax(oracle_logits(base, None, [*TOKENS, *output.outputs[0].token_ids]), -1)
    scores = output.prompt_logprobs
    assert scores is not None
    for place, token in enumerate(TOKENS[1:], 1):
        assert scores[place][token].logprob == pytest.approx(float(want[place - 1, token]), abs=1e-3)  # type: ignore[index]
    assert output.outputs[0].token_ids == want[len(TOKENS) - 1 : -1].argmax(-1).tolist()


def test_weights_that_are_read_again_must_not_bring_another_head(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    config = checkpoint_config(base.path)
    expected = Llama(config, device="meta").checkpoint_tensors()
    rewrite(base, same_head)
    Checkpoint(base.path, config).validate(expected, tied=True)
    rewrite(base, own_head)
    with pytest.raises(CheckpointError, match=r"differs from the embedding.*: restart it"):
        Checkpoint(base.path, config).validate(expected, tied=True)
