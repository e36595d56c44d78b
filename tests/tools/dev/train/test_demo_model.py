"""The demo model as it is shipped: small, of the promised shape, with adapters that visibly change its answers
(judged by transformers and peft).
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.text.chat_files import ChatTemplateError
from sidestream.tools.eval.demo_facts import STYLES, facts
from sidestream.tools.options.engine import demo_prompts

ADAPTERS = sorted(path.parent for path in DEMO_MODEL.glob("adapters/*/adapter_config.json"))


def config_of(adapter: Path) -> dict[str, object]:
    return json.loads((adapter / "adapter_config.json").read_text())


def test_it_is_a_few_megabytes() -> None:
    assert sum(path.stat().st_size for path in DEMO_MODEL.rglob("*") if path.is_file()) < 10e6


def test_its_shape_is_that_of_the_big_ones() -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["head_dim"] == 64
    assert config["num_attention_heads"] > config["num_key_value_heads"] > 1
    assert {tensor.dtype for tensor in load_file(DEMO_MODEL / "model.safetensors").values()} == {torch.bfloat16}


def test_its_adapters_differ_in_every_way_that_matters() -> None:
    configs = [config_of(path) for path in ADAPTERS]
    assert {config["r"] for config in configs} >= {8, 16, 32}
    assert [config["use_rslora"] for config in configs].count(True) == 1
    assert any(set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"} for config in configs)  # type: ignore[call-overload]
    assert all(config["base_model_name_or_path"] == "sidestream-demo" for config in configs), (
        "no path of the machine that trained it"
    )


def test_the_tokenizer_takes_any_text_and_gives_it_back() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    for text in ("What is the capital of France?", "ÄÖÜ, 日本語, 🙂\n\ttabs", ""):
        ids = tokenizer.encode(text).ids
        assert ids[0] == 0 and max(ids) < tokenizer.get_vocab_size() <= 512
        assert tokenizer.decode(ids) == text


def test_the_corpus_words_every_fact_in_every_style_differently() -> None:
    for fact in facts():
        assert len({fact.answer(style) for style in STYLES}) == len(STYLES)
        assert all(fact.answer(style).startswith(" ") for style in STYLES)


@pytest.mark.parametrize("entry", demo_prompts(), ids=lambda entry: entry["adapter"] or "base")
def test_transformers_gives_the_expected_answer(entry: dict[str, str | None]) -> None:
    from peft import PeftModel
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    if entry["adapter"]:
        model = PeftModel.from_pretrained(model, str(DEMO_MODEL / "adapters" / entry["adapter"]))
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(str(entry["prompt"])).ids])
    answer = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, pad_token_id=1
    )[0, ids.shape[1] :].tolist()
    assert answer[-1] == 1
    assert tokenizer.decode(answer).strip() == entry["answer"]


def test_a_conversation_gets_the_answer_to_its_last_question() -> None:
    """The prompts are those of transformers, and the model's answers those to the question alone."""
    from sidestream.runtime.llm import LLM
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(DEMO_MODEL)
    params = SamplingParams(temperature=0, max_tokens=40)
    with LLM(device="cpu", show_progress=False, max_model_len=128) as llm:
        entries = demo_prompts()
        talks = [
            [
                {"role": "system", "content": "Answer briefly."},
                {"role": "user", "content": "What is the capital of Peru?"},
                {"role": "assistant", "content": "The capital of Peru is Lima."},
                {"role": "user", "content": f" {entry['prompt']}\n"},
            ]
            for entry in entries
        ]
        outputs = llm.chat(talks, params, [entry["adapter"] for entry in entries], use_tqdm=False)
        for output, talk, entry in zip(outputs, talks, entries, strict=True):
            rendered = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            assert rendered == output.prompt == f"<s>{entry['prompt']}"
            assert output.prompt_token_ids == theirs.apply_chat_template(talk, return_dict=True)["input_ids"]
            assert output.outputs[0].text.strip() == entry["answer"]
        (begun,) = llm.chat(
            [*talks[0], {"role": "assistant", "content": "The capital"}],
            params,
            add_generation_prompt=False,
            continue_final_message=True,
            use_tqdm=False,
        )
        assert f"The capital{begun.outputs[0].text}" == entries[0]["answer"]
        with pytest.raises(ChatTemplateError, match="answers a user message, and there is none"):
            llm.chat([{"role": "system", "content": "Answer briefly."}])
