"""Contents as texts and as lists of parts, prefills, and variables: what transformers renders, on many templates."""

from collections.abc import Iterator
from typing import Any

import pytest
from sidestream.runtime.text.chat_files import ChatTemplateError, SingleChatTemplate
from sidestream.runtime.text.chat_renderer import ChatRenderer
from transformers.utils.chat_template_utils import render_jinja_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEXTS = {
    "chatml": CHATML,
    "chatml-trim": CHATML.replace("m.content", "m['content'] | trim"),
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama3": "{% for m in messages %}"
    "{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}",
    "zephyr": "{% for m in messages %}\n{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}{% set r = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + r + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}",
    "thinking": "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% set c = m.content %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c }}{{ eos_token }}{% endfor %}",
    "generation": "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% set x = 1 %}"
    "{% endgeneration %}{{ x }}\n{% endfor %}",
}
LISTS = {
    "loop": "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}</end>\n{% endfor %}",
    "alias": "{% for m in messages %}<{{ m.role }}>{% set cs = m['content'] %}"
    "{% for c in cs %}{{ c['text'] | trim }}{% endfor %}</end>{% endfor %}",
    "filter": "{% for m in messages %}<{{ m.role }}>{{ m.content | selectattr('type', 'equalto', 'text') "
    "| map(attribute='text') | join(' ') }}</end>{% endfor %}",
    "index": "{% for m in messages %}<{{ m.role }}>{{ m['content'][0]['text'] }}</end>{% endfor %}",
    "macro": "{% macro show(parts) %}{% for p in parts %}{{ p.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}</end>{% endfor %}",
}
BOTH = {
    "either": "{% macro show(c) %}{% if c is string %}{{ c }}"
    "{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}</end>\n{% endfor %}",
    "by-role": "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content | trim }}]"
    "{% elif m.content is string %}<{{ m.content }}>"
    "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}",
}
PREFILLS = [
    "Sure, here", "<", "|", "im", "end", "s", "e", "", " ", "\n", "Sure ", " Sure", "OK!\n\n", "\tx\n", "Hello", "user",
    "assistant", "</s>", "[INST]", "<think>a</think>\nb", "CONTINUE_FINAL_MESSAGE_TAG", "\U0001f30a ",
]  # fmt: skip
TALK = [{"role": "user", "content": "Hello, user!"}, {"role": "assistant", "content": "Hi."}]


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatRenderer]:
    renderer = ChatRenderer()
    yield renderer
    renderer.close()


def theirs(template: str, messages: Any, **options: Any) -> str:
    (text,), _ = render_jinja_template(conversations=[messages], chat_template=template, **TOKENS, **options)
    return str(text)


def ours(renderer: ChatRenderer, template: str, messages: Any, **options: Any) -> str:
    options = {"add_generation_prompt": False, **options}
    (text,) = renderer.prompts(SingleChatTemplate(template, **TOKENS), messages, **options)
    return text


def in_parts(messages: list[dict[str, Any]], *more: str) -> list[dict[str, Any]]:
    """The same messages with contents in parts."""
    return [
        {**message, "content": [{"type": "text", "text": text} for text in (message["content"], *more)]}
        for message in messages
    ]


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a template for texts is given of parts."""
    return [{**each, "content": "\n".join(part["text"] for part in each["content"])} for each in messages]


@pytest.mark.parametrize("name", [*TEXTS, *LISTS, *BOTH])
def test_each_form_of_content_reaches_a_template_that_reads_one(renderer: ChatRenderer, name: str) -> None:
    template = {**TEXTS, **LISTS, **BOTH}[name]
    system = [{"role": "system", "content": " Short. "}] if name in LISTS else []
    texts, parts = system + TALK, in_parts(system + TALK, "And this?")
    expected = theirs(template, in_parts(texts) if name in LISTS else texts)
    assert ours(renderer, template, texts) == expected
    expected = theirs(template, joined(parts) if name in TEXTS else parts)
    assert (ours(renderer, template, parts) == expected and "And this?" in expected) or name == "index"


def test_roles_may_have_contents_of_different_forms(renderer: ChatRenderer) -> None:
    system = [{"role": "system", "content": " Short. "}]
    assert ours(renderer, BOTH["by-role"], system + in_parts(TALK)) == "[Short.]<Hello, user!><Hi.>"
    assert ours(renderer, BOTH["by-role"], in_parts(system) + TALK) == "[Short.]<Hello, user!><Hi.>"


@pytest.mark.parametrize("form", ["text", "parts"])
@pytest.mark.parametrize("name", [*TEXTS, *LISTS, *BOTH])
def test_a_prompt_ends_within_the_last_message_as_with_transformers(
    renderer: ChatRenderer, name: str, form: str
) -> None:
    template = {**TEXTS, **LISTS, **BOTH}[name]
    for prefill in PREFILLS:
        messages = [*TALK, TALK[0], {"role": "assistant", "content": prefill}]
        given = in_parts(messages) if form == "parts" else messages
        read = messages if name in TEXTS else in_parts(messages) if name in LISTS else given
        try:
            expected = theirs(template, read, continue_final_message=True)
        except ValueError:
            with pytest.raises(ChatTemplateError, match="continue_final_message"):
                ours(renderer, template, given, continue_final_message=True)
        else:
            assert ours(renderer, template, given, continue_final_message=True) == expected, repr(prefill)


def test_functions_and_filters_are_transformers(renderer: ChatRenderer) -> None:
    template = (
        "{{ {'b': '<é>', 'a': [1, none]} | tojson }}{{ [1] | tojson(true) }}{{ {'b': 'é'} | tojson(indent=2) }}"
        "{% set ns = namespace(n=0, self=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}{{ ns.n }}{{ dict(a=1).a }}"
        "{{ strftime_now('%Y-%m-%d') | length }}"
    )
    assert ours(renderer, template, TALK) == theirs(template, TALK)
    for wrong in (
        "{{ raise_exception('no ' + messages[0].role) }}",
        "{% set n = namespace(_x=1) %}",
        "{{ dict.mro() }}",
    ):
        with pytest.raises(Exception, match=r"no user|_x|mro") as refusal:
            theirs(wrong, TALK)
        with pytest.raises(ChatTemplateError, match=type(refusal.value).__name__):
            ours(renderer, wrong, TALK)
