"""Conversations become the prompts that transformers makes of them, in a child process that is kept."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from sidestream.runtime.requests.errors import RequestError
from sidestream.runtime.text.chat import ChatRenderer, as_conversations
from sidestream.runtime.text.chat_template import ChatTemplateError, ChatWords, chat_words
from sidestream.runtime.text.prompts import without_special_tokens
from sidestream.runtime.text.requests import make_requests
from sidestream.runtime.text.tokenizer import load_tokenizer
from support.tiny_tokenizers import byte_level, metaspace
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}<tool>{{ t.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"
)
WORDS = ChatWords(TEMPLATE, "<s>", "</s>")
TALK = [{"role": "system", "content": "brief"}, {"role": "user", "content": " hello "}]


@pytest.fixture
def renderer() -> Iterator[ChatRenderer]:
    renderer = ChatRenderer()
    yield renderer
    renderer.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"mood": "(gladly)"}},
        {"chat_template": "{{ messages | length }}{{ eos_token }}"},
    ],
    ids=str,
)
def test_prompts_are_those_of_transformers(renderer: ChatRenderer, options: dict[str, object]) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        chat_template=TEMPLATE,
        bos_token="<s>",
        eos_token="</s>",
    )
    asked = {"add_generation_prompt": True, **options}
    more = asked.pop("chat_template_kwargs", {})
    expected = theirs.apply_chat_template(TALK, tokenize=False, **asked, **more)  # type: ignore[arg-type]
    assert renderer.prompts(WORDS, TALK, **options) == [expected]  # type: ignore[arg-type]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


@pytest.mark.parametrize("kind", [byte_level, metaspace])
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(
    ("bos", "template"),
    [
        ("<s>", WITH_BOS),  # Llama and Mistral
        ("<s>", CHATML),  # a fine-tune of these whose template has none
        ("<|im_start|>", CHATML),  # SmolLM2: what the template begins with counts as BOS
        (None, CHATML),  # Qwen
    ],
)
def test_the_tokens_of_a_chat_are_those_of_transformers(
    renderer: ChatRenderer, kind: Any, adds_bos: bool, bos: str | None, template: str, tmp_path: Path
) -> None:
    """No BOS is lost and none comes twice, whether the tokenizer adds one to other texts or not."""
    made = kind(["<s>", "</s>", "<|im_start|>", "<|im_end|>"], "<s>" if adds_bos else None)
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, bos_token=bos, eos_token="</s>")
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": "</s>"}))
    prompts = map(without_special_tokens, renderer.prompts(chat_words(tmp_path)._replace(template=template), TALK))
    (request,) = make_requests(
        list(prompts), None, None, tokenizer=load_tokenizer(tmp_path), vocabulary=500, max_model_len=500, adapters={},
        first=0, compile_grammar=lambda constraint: None,
    )  # fmt: skip
    assert request.prompt_ids == theirs.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]


def test_one_conversation_or_several_and_text_in_parts(renderer: ChatRenderer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert renderer.prompts(WORDS, [TALK, parts], add_generation_prompt=False, tools=[{"name": "dig"}]) == [
        "<s><tool>dig<system>brief</end>\n<user>hello</end>\n",
        "<s><tool>dig<user>a\nb</end>\n",
    ]
    assert as_conversations([]) == []


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        ("hello", {}, "messages must be a list"),
        ({"role": "user", "content": "x"}, {}, "not dict"),
        ([TALK, []], {}, "conversation 1: there is no message"),
        ([TALK, ["hello"]], {}, "conversation 1: message 0 must be a dict"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "reads text only"),
        ([{"role": "root", "content": "x"}], {}, "must have a role"),
        (TALK, {"continue_final_message": True}, "add_generation_prompt=False"),
        (TALK, {"chat_template": 3}, "a template's text, not int"),
        (TALK, {"chat_template": "{{ raise_exception('no system') }}"}, "no system"),
        (
            TALK,
            {"chat_template": "{{ 1 }}", "continue_final_message": True, "add_generation_prompt": False},
            "changes the last message's text",
        ),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused(
    renderer: ChatRenderer, messages: object, options: dict[str, object], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        renderer.prompts(WORDS, messages, **options)  # type: ignore[arg-type]


def test_a_model_without_a_template_says_where_one_would_be(renderer: ChatRenderer) -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template \(chat_template.jinja"):
        renderer.prompts(ChatWords(None, "", ""), TALK)
    assert renderer.prompts(ChatWords(None, "", ""), TALK, chat_template="{{ messages[1].content }}") == [" hello "]


def test_the_child_process_is_kept_and_ended(renderer: ChatRenderer) -> None:
    def child() -> int:
        assert renderer._template is not None and renderer._template._child._child is not None
        return renderer._template._child._child.pid

    renderer.prompts(WORDS, TALK)
    first = child()
    renderer.prompts(WORDS, TALK)
    assert child() == first
    renderer.prompts(WORDS._replace(template="other"), TALK)
    second = child()
    assert second != first
    renderer.close()
    renderer.close()
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert renderer.prompts(WORDS, TALK, chat_template="again") == ["again"]
