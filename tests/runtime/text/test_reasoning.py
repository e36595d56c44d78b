"""Reasoning apart from content: the same split wherever the text is cut, and the same number of tokens."""

import pytest
from sidestream.runtime.text.reasoning import ReasoningParser, SplitText, reasoning_start

QWEN = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
CASES = [
    # start, text, reasoning, content
    ("optional", "<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    ("optional", "\n<think>a < b, </b> and </thin</think>c", "a < b, </b> and </thin", "c"),
    ("optional", "<thinking> is a word", "", "<thinking> is a word"),
    ("optional", "  plain", "", "  plain"),
    ("optional", "plain <think>no</think> text\n", "", "plain <think>no</think> text\n"),
    ("optional", "<think></think>", "", ""),
    ("optional", "<think>\n \n</think>\n\n{}", "", "{}"),
    ("optional", "<think>cut off \n", "cut off", ""),
    ("optional", "<thi", "", "<thi"),
    ("optional", "", "", ""),
    ("inside", "No opener,\n\nit ends </think> so.", "No opener,\n\nit ends", "so."),
    ("inside", "\n<think>\nAn opener again</think>\nyes ", "An opener again", "yes "),
    ("inside", "never closed </think", "never closed </think", ""),
    ("inside", "one</think>two</think>three", "one", "two</think>three"),
    ("none", "<think>kept</think> whole", "", "<think>kept</think> whole"),
    ("optional", "<think>漢字 👩🏾‍🚒</think>é", "漢字 👩🏾‍🚒", "é"),
]


def split(parser: ReasoningParser, pieces: list[str]) -> SplitText:
    """What the parser makes of a text in pieces."""
    whole = SplitText()
    for number, piece in enumerate(pieces):
        part = parser.push(piece, last=number == len(pieces) - 1)
        whole.reasoning += part.reasoning
        whole.content += part.content
    return whole


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
def test_every_cut_gives_the_same_split(start, text, reasoning, content):
    wanted = SplitText(reasoning, content)
    assert split(ReasoningParser(start), [text]) == wanted
    assert split(ReasoningParser(start), [*text, ""]) == wanted
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:]]
            assert split(ReasoningParser(start), pieces) == wanted, pieces


def test_reasoning_is_sent_as_it_arrives():
    parser = ReasoningParser("optional")
    sent = [parser.push(piece) for piece in ["<th", "ink>", "\nfirst ", "second</", "b> third", "</think>\n", "\nDone"]]
    assert [part.reasoning for part in sent] == ["", "", "first", " second", "</b> third", "", ""]
    assert [part.content for part in sent] == ["", "", "", "", "", "", "Done"]
    assert parser.is_done


@pytest.mark.parametrize(("closer_id", "tokens"), [(9, 4), (None, 4)])
def test_tokens_up_to_the_closer_are_counted(closer_id, tokens):
    pieces = [("<think>", 8), ("one", 1), (" two", 2), ("</think>", 9), ("\n\n", 3), ("three", 4)]
    streamed, whole = ReasoningParser("optional", closer_id), ReasoningParser("optional", closer_id)
    for text, token in pieces:
        streamed.push(text, token_ids=[token])
    assert streamed.num_tokens == tokens
    whole.push("".join(text for text, _ in pieces), True, [token for _, token in pieces])
    assert whole.num_tokens == pytest.approx(tokens, abs=0 if closer_id else 1)


def test_text_that_arrives_after_its_tokens_is_counted():
    parser = ReasoningParser("optional", 9)
    parser.push("", token_ids=[8, 1, 2, 9])
    parser.push("<think>one two</think>three", True, [4])
    assert parser.num_tokens == 4


def test_an_answer_without_reasoning_has_no_reasoning_tokens():
    parser = ReasoningParser("optional", 9)
    parser.push("plain text", True, [1, 2])
    assert parser.num_tokens == 0


@pytest.mark.parametrize(
    ("form", "template", "prompt", "continued", "start"),
    [
        ("auto", QWEN, "<|im_start|>assistant\n", "", "optional"),
        ("auto", QWEN, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "none"),
        ("auto", QWEN, "<|im_start|>assistant\n<think>\n", "", "inside"),
        ("auto", QWEN, "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "", "optional"),
        ("auto", "{{ messages }}", "assistant: <think>\n", "", "none"),
        ("none", QWEN, "<think>\n", "", "none"),
        ("qwen3", "{{ messages }}", "assistant:", "", "optional"),
        ("deepseek_r1", "{{ messages }}", "assistant:", "", "inside"),
        ("deepseek_r1", "{{ messages }}", "assistant:</think>", "", "none"),
        ("qwen3", "", "assistant: <think>I was", "<think>I was", "inside"),
        ("qwen3", "", "assistant: <think>I was</think> so", "<think>I was</think> so", "none"),
        ("deepseek_r1", "", "assistant: So", "So", "none"),
    ],
)
def test_the_prompt_decides_how_the_answer_begins(form, template, prompt, continued, start):
    assert reasoning_start(form, template, prompt, continued) == start
