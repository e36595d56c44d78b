"""Conversations become the prompts that transformers makes of them, in a child process that is kept."""

import os
from collections.abc import Iterator

import pytest
import tokenizers
from sidestream.runtime.requests.errors import RequestError
from sidestream.runtime.text.chat import ChatRenderer, as_conversations
from sidestream.runtime.text.chat_template import ChatTemplateError, ChatWords
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
    renderer = ChatRenderer(strip_bos=False)
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


def test_one_conversation_or_several_and_text_in_parts(renderer: ChatRenderer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert renderer.prompts(WORDS, [TALK, parts], add_generation_prompt=False, tools=[{"name": "dig"}]) == [
        "<s><tool>dig<system>brief</end>\n<user>hello</end>\n",
        "<s><tool>dig<user>a\nb</end>\n",
    ]
    assert as_conversations([]) == []
    assert ChatRenderer().prompts(WORDS, [parts], chat_template="{{ bos_token }}x{{ bos_token }}") == ["x<s>"]


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
        assert renderer._template is not None and renderer._template._child is not None
        return renderer._template._child.pid

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
