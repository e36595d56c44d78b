"""Conversations become the prompts that transformers makes of them, in a child process that is kept."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.text.chat_files import ChatTemplateError, ChatTemplates, SingleChatTemplate, read_chat_templates
from sidestream.runtime.text.chat_messages import as_conversations
from sidestream.runtime.text.chat_renderer import ChatRenderer, TemplateProcess
from sidestream.runtime.text.prompts import make_requests, without_special_tokens
from sidestream.runtime.text.tokenizer import load_tokenizer
from support.tiny_tokenizers import byte_level, metaspace
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}<tool>{{ t.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"
)
WORDS = SingleChatTemplate(TEMPLATE, "<s>", "</s>")
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
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
    words = read_chat_templates(tmp_path, template)
    prompts = map(without_special_tokens, renderer.prompts(words, TALK))
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
    ("messages", "options", "expected"),
    [
        ("hello", {}, "messages must be a list"),
        ({"role": "user", "content": "x"}, {}, "not dict"),
        ([TALK, []], {}, r"messages\[1\] is empty"),
        ([TALK, ["hello"]], {}, r"messages\[1\]\[0\] must be a dict"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, r"messages\[0\].content\[0\] is a content part"),
        ([{"role": "a root", "content": "x"}], {}, r"messages\[0\].role=.a root. must be a name"),
        (TALK, {"continue_final_message": True}, "add_generation_prompt=False"),
        (TALK, {"chat_template": 3}, "a template's text, not int"),
        (TALK, {"chat_template": "{{ raise_exception('no system') }}"}, "no system"),
        (
            TALK,
            {"chat_template": "{{ 1 }}", "continue_final_message": True, "add_generation_prompt": False},
            "drops the last message's text",
        ),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused(
    renderer: ChatRenderer, messages: object, options: dict[str, object], expected: str
) -> None:
    with pytest.raises(RequestError, match=expected):
        renderer.prompts(WORDS, messages, **options)  # type: ignore[arg-type]


def test_a_model_without_a_template_says_where_one_would_be(renderer: ChatRenderer) -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template \(chat_template.jinja"):
        renderer.prompts(ChatTemplates(), TALK)
    assert renderer.prompts(ChatTemplates(), TALK, chat_template="{{ messages[1].content }}") == [" hello "]


def children(renderer: ChatRenderer) -> list[int]:
    """The ids of the processes that run."""
    found = [process._child._child for process in renderer.processes]
    return [child.pid for child in found if child is not None]


def test_a_child_process_is_kept_for_all_templates_and_ended(renderer: ChatRenderer) -> None:
    renderer.prompts(WORDS, TALK)
    (first,) = children(renderer)
    for number in range(20):
        assert renderer.prompts(SingleChatTemplate(f"other {number}"), TALK) == [f"other {number}"]
    assert children(renderer) == [first]
    renderer.close()
    renderer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert renderer.prompts(WORDS, TALK, chat_template="again") == ["again"]


def busy(processes: int) -> tuple[ChatRenderer, list[threading.Thread], list[object]]:
    """A renderer with an endless rendering in each of its processes, the threads that wait, and their results."""
    renderer, results = ChatRenderer(processes), list[object]()

    def render() -> None:
        try:
            results.append(renderer.prompts(SingleChatTemplate(ENDLESS), TALK))
        except ChatTemplateError as problem:
            results.append(problem)

    threads = [threading.Thread(target=render) for _ in range(processes)]
    for thread in threads:
        thread.start()
    while len(children(renderer)) < processes or not renderer._idle.empty():
        time.sleep(0.01)
    return renderer, threads, results


def test_as_many_templates_are_rendered_at_once_as_there_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TemplateProcess.render.__kwdefaults__, "seconds", 600.0)
    renderer, threads, results = busy(4)
    assert len(set(children(renderer))) == 4
    for pid in children(renderer):
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert [str(result) for result in results] == ["the chat template failed: its process ended"] * 4
    assert renderer.prompts(WORDS, TALK)[0].startswith("<s>"), "one that died is replaced"
    renderer.close()


def test_a_process_that_dies_takes_nothing_else_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TemplateProcess.render.__kwdefaults__, "seconds", 600.0)
    renderer, threads, results = busy(2)
    killed, other = children(renderer)
    os.kill(killed, signal.SIGKILL)
    while not results:
        time.sleep(0.01)
    assert str(results[0]) == "the chat template failed: its process ended"
    assert renderer.prompts(WORDS, TALK)[0].startswith("<s>"), "in its successor"
    (left,) = [pid for pid in children(renderer) if pid == other]
    os.kill(left, signal.SIGKILL)
    for thread in threads:
        thread.join()
    renderer.close()


RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "padding",
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(({name: None}, name) for name in RESERVED),
        ({"documents": "text"}, "documents must be a list of objects"),
        ({"documents": [1]}, "documents must be a list of objects"),
        ([("a", 1)], "must be a dict"),
        ({1: "a"}, "names that are text"),
    ],
    ids=str,
)
def test_reserved_variables_are_refused_by_name(renderer: ChatRenderer, given: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs.*{expected}") as refusal:
        renderer.prompts(WORDS, TALK, chat_template_kwargs=given)
    assert getattr(refusal.value, "param", None) == "chat_template_kwargs"


NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]
HOSTILE: list[dict[str, Any]] = [
    *({name: value} for name in ("self", "seconds", "limit", "variables", "tokens") for value in (1e-9, "x", None, [])),
    *({name: 3} for name in ("range", "namespace", "dict", "raise_exception", "strftime_now", "lipsum", "loop")),
    {"a b": 1, "": 2, "__class__": 3, "bos_token": {"a": 1}, "mood": float("nan")},
    {"mood": NESTED},
    {"mood": 10**5000},
    {"mood": "\ud800"},
    {"mood": {("a", "b"): 1}},
]


@pytest.mark.parametrize("given", HOSTILE, ids=lambda given: str(list(given))[:40])
def test_no_value_of_a_variable_ends_the_process(renderer: ChatRenderer, given: dict[str, Any]) -> None:
    """What a variable's value makes impossible is an error of this request."""
    renderer.prompts(WORDS, TALK)
    (process,) = renderer.processes
    child = process._child._child
    try:
        (text,) = renderer.prompts(WORDS, TALK, chat_template_kwargs=given)
    except ChatTemplateError as problem:
        assert "its process ended" not in str(problem) and "more than" not in str(problem)
    else:
        assert "<user>hello</end>" in text
    assert process._child._child is child and child is not None and child.poll() is None
    assert renderer.prompts(WORDS, TALK)[0].startswith("<s><system>brief")


def test_a_caller_variable_does_not_decide_which_contents_a_template_reads(renderer: ChatRenderer) -> None:
    """The first request's variables make the template fail; the second request is rendered all the same."""
    walks = "{% for m in messages %}{% for p in m.content %}{{ p.text + mood }}{% endfor %}{% endfor %}"
    words = SingleChatTemplate("{% set mood = mood or '' %}" + walks)
    with pytest.raises(ChatTemplateError):
        renderer.prompts(words, TALK, chat_template_kwargs={"mood": 1})
    assert renderer.prompts(words, TALK) == ["brief hello "]


@pytest.mark.parametrize("template", ["{{ tools is none }} {{ documents is none }}", "{{ pad_token }}|{{ unk_token }}"])
def test_a_template_has_the_variables_that_transformers_gives(
    renderer: ChatRenderer, template: str, tmp_path: Path
) -> None:
    made = byte_level(["<s>", "</s>", "<pad>", "<unk>"], None)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, bos_token="<s>", pad_token="<pad>", unk_token="<unk>"
    )
    theirs.save_pretrained(tmp_path)
    expected = theirs.apply_chat_template(TALK, tokenize=False)
    assert renderer.prompts(read_chat_templates(tmp_path), TALK, add_generation_prompt=False) == [expected]
