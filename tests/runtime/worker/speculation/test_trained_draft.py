"""A trained draft in an engine: drafts follow the published formula, and an adapter's LoRA of the draft changes only
that adapter's drafts.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream import LLM, OptionError, RequestError, SamplingParams
from sidestream.graphs.adapter_config import AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.config_fields import ConfigError
from support.eagle import Keys, dense_head, eagle_head
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

DRAFTS = 3
OPTIONS: dict[str, Any] = {"device": "cpu", "show_progress": False, "max_model_len": 128, "max_num_seqs": 4}
FP32: dict[str, Any] = OPTIONS | {"precision": "fp32", "speculation": DRAFTS}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("base"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(base: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    return eagle_head(tmp_path_factory.mktemp("draft"), LlamaConfig.from_directory(base.path), vocabulary=208, **layers)


def recorded(llm: LLM) -> list[tuple[list[int], list[list[int]]]]:
    """A list that fills with (how many tokens each sequence of a step has, what is drafted for it)."""
    trained, found = llm.engine.runner.token_history.trained, []
    draft = trained.draft

    def record(staged: Any, lengths: torch.Tensor, block_table: torch.Tensor, bucket: Any) -> torch.Tensor:
        drafts = draft(staged, lengths, block_table, bucket)
        rows = staged["rows"]
        found.append((lengths[rows[rows >= 0]].tolist(), drafts[rows >= 0].tolist()))
        return drafts

    trained.draft = record
    return found


def by_formula(base: TinyBase, head: Path, tokens: list[int]) -> list[int]:
    """What the head drafts after `tokens`."""
    config = json.loads((head / "config.json").read_text())
    tensors, mapping = load_file(head / "model.safetensors"), load_file(head / "model.safetensors")["d2t"]
    with torch.no_grad():
        states = base.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0, :-1] for layer in (1, 2, 3)], dim=-1)
        embedding, keys = base.model.get_input_embeddings().weight, Keys()
        positions = torch.arange(len(tokens) - 1)
        hidden, logits = dense_head(tensors, config, embedding[tokens[1:]], features, positions, keys)
        found = []
        for step in range(DRAFTS):
            best = int(logits[-1].argmax())
            found.append(best + int(mapping[best]))
            place = torch.tensor([len(tokens) - 1 + step])
            hidden, logits = dense_head(tensors, config, embedding[[found[-1]]], hidden[-1:], place, keys)
    return found


def test_what_is_drafted_is_the_formula_over_the_whole_sequence(base: TinyBase, head: Path) -> None:
    """Two sequences, one over a page's end, their prompts in chunks, with a step that also has a prompt in it."""
    prompts = [torch.randint(0, 250, (length,)).tolist() for length in (70, 9)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(base.path, draft=head, max_num_batched_tokens=32, **FP32) as llm:
        found = recorded(llm)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    seen = 0
    for lengths, drafts in found:
        for length, drafted in zip(lengths, drafts, strict=True):
            tokens = next(text for text in texts if abs(length - len(text)) < 20)[:length]
            room = DRAFTS if len(tokens) + DRAFTS < len(texts[length < 40]) else 1
            assert drafted[:room] == by_formula(base, head, tokens)[:room]
            seen += 1
    assert seen >= 8


def test_int8_gives_the_head_the_hidden_states_themselves(base: TinyBase, head: Path) -> None:
    """The residual stream is held as sixteenths in fp16 there."""
    tokens = torch.randint(0, 250, (40,)).tolist()
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(base.path, draft=head, speculation=DRAFTS, precision="int8", **OPTIONS) as llm:
        llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        trained = llm.engine.runner.token_history.trained
        features = [trained.feature_buffer(place, len(tokens)).float() for place in range(3)]
        (answer,) = llm.generate([{"prompt_token_ids": tokens[:9]}], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 8
    with torch.no_grad():
        states = base.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for feature, layer in zip(features, (1, 2, 3), strict=True):
        assert float((feature - states[layer][0]).norm() / states[layer].norm()) < 0.1


def lora_of(head: Path, adapter: Path, scale: float) -> None:
    """Writes a random LoRA of the head into an adapter's directory."""
    tensors, target = load_file(head / "model.safetensors"), adapter / "draft"
    target.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "down_proj"]}
    (target / "adapter_config.json").write_text(json.dumps(settings))
    sides = {}
    for name in ("midlayer.self_attn.v_proj", "midlayer.mlp.down_proj"):
        rows, columns = tensors[f"{name}.weight"].shape
        sides[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, columns) * scale / math.sqrt(columns)
        sides[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 4) * scale
    save_file(sides, target / "adapter_model.safetensors")


def test_a_lora_of_the_draft_changes_the_drafts_of_its_adapter_only(base: TinyBase, head: Path, tmp_path: Path) -> None:
    paths = tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=8)])
    first, second = (Path(shutil.copytree(path, tmp_path / path.name)) for path in paths)
    prompt = {"prompt_token_ids": torch.randint(0, 250, (20,)).tolist()}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def asked() -> tuple[list[Any], list[Any], list[str]]:
        adapters = {"first": first, "second": second}
        with LLM(base.path, adapters, draft=head, **FP32) as llm:
            found, tokens, drafts = recorded(llm), [], []
            for adapter in ("first", "second", None):
                found.clear()
                (output,) = llm.generate([prompt], params, adapter=adapter, use_tqdm=False)
                tokens.append(output.outputs[0].token_ids)
                drafts.append(list(found))
            return tokens, drafts, [each.content_hash for each in map(llm.registry.by_number, (0, 1))]

    tokens, without, hashes = asked()
    lora_of(head, first, 2.0)
    again, drafts, changed = asked()
    assert again == tokens, "a draft changes no token"
    assert drafts[0] != without[0] and drafts[1:] == without[1:]
    assert changed[0] != hashes[0] and changed[1] == hashes[1], "another content"
    config = json.loads((first / "draft" / "adapter_config.json").read_text())
    (first / "draft" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(AdapterError, match=r"its LoRA of the draft: .*use_dora"):
        asked()


def test_it_sleeps_and_wakes_with_the_model(base: TinyBase, head: Path) -> None:
    prompt = {"prompt_token_ids": torch.randint(0, 250, (20,)).tolist()}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(base.path, draft=head, enable_sleep_mode=True, speculation_history=0, **FP32) as llm:
        found = recorded(llm)
        answers, drafts = [], []
        for level in (1, 2):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
            drafts.append(list(found))
            found.clear()
            llm.sleep(level)
            llm.wake_up()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert answers == [output.outputs[0].token_ids] * 2
    assert drafts == [found, found] and len(found) > 3


def test_what_does_not_fit_is_refused_by_name(base: TinyBase, head: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="speculation is off; add speculation='auto'"):
        LLM(base.path, draft=head, **OPTIONS)
    with pytest.raises(OptionError, match="draft= with tensor_parallel_size=2 is not supported"):
        LLM(base.path, draft=head, tensor_parallel_size=2, **FP32)
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(base.path, draft=tmp_path, **FP32)
    other = eagle_head(tmp_path, LlamaConfig.from_directory(base.path), vocabulary=32, vocab_size=640)
    with pytest.raises(ConfigError, match="the draft's vocab_size is 640, the model's is 320: serve the model"):
        LLM(base.path, draft=other, **FP32)
    deep = {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}
    other = eagle_head(tmp_path / "deep", LlamaConfig.from_directory(base.path), vocabulary=32, **deep)
    with pytest.raises(ConfigError, match="after layer 9, but the model has 4 layers"):
        LLM(base.path, draft=other, **FP32)


def test_an_adapter_that_comes_later_needs_room_for_its_lora_of_the_draft(
    base: TinyBase, head: Path, tmp_path: Path
) -> None:
    """The stacks' shape is fixed at the start."""
    paths = tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=8)])
    first, second = (Path(shutil.copytree(path, tmp_path / path.name)) for path in paths)
    lora_of(head, first, 1.0)
    shutil.copytree(first / "draft", second / "draft")
    config = json.loads((second / "draft" / "adapter_config.json").read_text())
    tensors = load_file(second / "draft" / "adapter_model.safetensors")
    wide = {name: torch.cat([value] * 5, dim=int("lora_B" in name)) for name, value in tensors.items()}
    (second / "draft" / "adapter_config.json").write_text(json.dumps(config | {"r": 20}))
    save_file(wide, second / "draft" / "adapter_model.safetensors")
    with LLM(base.path, {"first": first}, draft=head, **FP32) as llm:
        with pytest.raises(RequestError, match=r"'second', its LoRA of the draft: .* does not fit stacks of rank 16"):
            llm.add_adapter("second", second)
        assert llm.adapters == ("first",)
