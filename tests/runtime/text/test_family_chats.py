"""The tokens of a conversation are those of transformers, for every family that is served: its kind of tokenizer, its
special tokens, what it puts before a text, and a chat template with the constructs that the family's own has."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from sidestream.graphs.families import FAMILIES
from sidestream.runtime.text.chat_files import read_chat_templates
from sidestream.runtime.text.chat_renderer import ChatRenderer
from sidestream.runtime.text.prompts import make_requests, without_special_tokens
from sidestream.runtime.text.tokenizer import load_tokenizer
from support.tiny_tokenizers import byte_level, metaspace, prepended
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
TALK = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "  Grüße, \u4f60\u597d! <b>2 < 3</b> "},
    {"role": "assistant", "content": "Hm.\n\nYes"},
    {"role": "user", "content": "And\tnow? {{ no }} "},
]
TOOLS = [{"type": "function", "function": {"name": "dig", "parameters": {"type": "object", "größe": "<1>"}}}]
CALL = [
    {"role": "user", "content": "Dig."},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "dig", "arguments": {"deep": 2}}}]},
    {"role": "tool", "content": "done"},
]


@dataclass(frozen=True)
class Chat:
    """How models of an architecture read conversations."""

    architecture: str
    kind: Callable[..., tokenizers.Tokenizer]
    special: list[str]
    bos: str | None = None
    eos: str = "</s>"
    adds_bos: bool = False
    strips: bool = False
    talks: list[list[dict[str, Any]]] = field(default_factory=lambda: [TALK, TALK[1:]])
    variables: dict[str, Any] = field(default_factory=dict)


IM = ["<|im_start|>", "<|im_end|>"]
PHI3 = ["<|user|>", "<s>", "</s>", "<|system|>", "<|assistant|>", "<|end|>"]
ROLES = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
INST = ["[INST]", "[/INST]", "<s>", "</s>"]
QWEN: dict[str, Any] = {"kind": byte_level, "special": [*IM, "<|endoftext|>"], "eos": "<|im_end|>"}
CHATS = {
    "llama-3": Chat("LlamaForCausalLM", byte_level, HEADERS, HEADERS[0], HEADERS[3], adds_bos=True),
    "mistral-v0.3": Chat("MistralForCausalLM", metaspace, INST, "<s>", adds_bos=True),
    "mistral-nemo": Chat("MistralForCausalLM", byte_level, INST, "<s>", adds_bos=True),
    "qwen2.5": Chat("Qwen2ForCausalLM", **QWEN, talks=[TALK, TALK[1:], CALL], variables={"tools": TOOLS}),
    "qwen3": Chat("Qwen3ForCausalLM", **QWEN, talks=[TALK], variables={"enable_thinking": False}),
    "smollm3": Chat("SmolLM3ForCausalLM", byte_level, [*IM, "<think>", "</think>"], None, "<|im_end|>"),
    "granite-3": Chat("GraniteForCausalLM", byte_level, ROLES, ROLES[0], ROLES[0]),
    "phi-3": Chat("Phi3ForCausalLM", prepended, PHI3, "<s>", "<|end|>", strips=True),
    "phi-4": Chat("Phi3ForCausalLM", byte_level, [*IM, "<|im_sep|>", "<|endoftext|>"], "<|endoftext|>", IM[1]),
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatRenderer]:
    renderer = ChatRenderer()
    yield renderer
    renderer.close()


def test_no_family_is_left_out() -> None:
    sparse = {"Qwen3MoeForCausalLM", "MixtralForCausalLM", "GraniteMoeForCausalLM"}  # talk as Qwen3, Mistral, Granite
    assert {chat.architecture for chat in CHATS.values()} == set(FAMILIES) - sparse


@pytest.mark.parametrize("name", CHATS)
def test_the_tokens_of_a_chat_are_those_of_transformers(renderer: ChatRenderer, name: str, tmp_path: Path) -> None:
    chat, template = CHATS[name], (TEMPLATES / f"{name}.jinja").read_text()
    special = [AddedToken(word, special=True, rstrip=chat.strips) for word in chat.special]
    made = chat.kind(special, chat.bos if chat.adds_bos else None)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, bos_token=chat.bos, eos_token=chat.eos
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": chat.bos, "eos_token": chat.eos}))
    (tmp_path / "chat_template.jinja").write_text(template)
    tools, others = chat.variables.get("tools"), {k: v for k, v in chat.variables.items() if k != "tools"}
    asked: dict[str, Any] = {"tools": tools, "chat_template_kwargs": others}
    prompts = [renderer.prompts(read_chat_templates(tmp_path), talk, **asked)[0] for talk in chat.talks]
    requests = make_requests(
        list(map(without_special_tokens, prompts)), None, None, tokenizer=load_tokenizer(tmp_path), vocabulary=500,
        max_model_len=2000, adapters={}, first=0, compile_grammar=lambda constraint: None,
    )  # fmt: skip
    for talk, request in zip(chat.talks, requests, strict=True):
        expected = theirs.apply_chat_template(talk, add_generation_prompt=True, tools=tools, **others)["input_ids"]
        assert request.prompt_ids == expected
        assert theirs.convert_tokens_to_ids(chat.special[0]) in expected, "special tokens are tokens, not letters"
