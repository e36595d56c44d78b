"""Documents to read and questions to answer: your prompts, the demo model's facts, or the standard library."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...runtime.worker.calibrate.scorer import Document
from .corpus import documents as library_documents
from .demo_facts import STYLES, facts

SEED = 2026
EXTRA_TOKENS = 4  # an answer may be this much longer than the expected one
OPEN_TOKENS = 64  # the longest answer to a question without an expected one
T = TypeVar("T", "Question", Document)


@dataclass(frozen=True)
class Question:
    """One question to an adapter (None: the base model).

    answer  the right answer; None: bf16's is right
    group   questions with accuracies of their own, left out of the pooled accuracy; "": the adapter's
    """

    tokens: Sequence[int]
    answer: str | None
    max_tokens: int
    adapter: str | None = None
    group: str = ""

    @property
    def label(self) -> str:
        """Return the name of the row that counts the question."""
        return self.group or self.adapter or "base"


@dataclass
class Suite:
    """Documents and questions of every arm."""

    title: str
    documents: list[Document] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest document or question with its answer."""
        asked = (len(question.tokens) + question.max_tokens for question in self.questions)
        return max((*asked, *(len(document.tokens) for document in self.documents)), default=1)


@dataclass(frozen=True)
class Limits:
    """Sizes of a suite.

    tasks      questions of each adapter
    documents  texts that each adapter reads
    longest    tokens of a document
    """

    tasks: int
    documents: int
    longest: int


def demo_suite(limits: Limits, encode: Callable[[str], list[int]], adapters: Sequence[str]) -> Suite:
    """Return the demo model's facts, asked of the base model and of each style's adapter."""
    suite = Suite("the demo's facts")
    for style in STYLES:
        adapter = None if style == "base" else style
        if adapter is not None and adapter not in adapters:
            continue
        asked = [(prompt, fact.answer(style)) for fact in facts() for prompt in fact.questions]
        random.Random(f"{SEED} {style}").shuffle(asked)
        suite.questions += [question(encode, prompt, answer, adapter) for prompt, answer in asked[: limits.tasks]]
        random.Random(f"documents {SEED} {style}").shuffle(asked)
        suite.documents += [Document(encode(prompt + answer), adapter) for prompt, answer in asked[: limits.documents]]
    return suite


def file_suite(path: Path, limits: Limits, encode: Callable[[str], list[int]], adapters: Sequence[str]) -> Suite:
    """Return the prompts of a file: one a line, or JSON lines {"prompt", "answer"?, "adapter"?}.

    A prompt without an adapter is asked of the base model and of every adapter. Raises ValueError for a line that is
    neither text nor such an object, and for an unknown adapter.
    """
    suite = Suite(path.name)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        entry = _entry(path, number, line)
        named = entry.get("adapter", "")
        if named and named not in adapters:
            raise ValueError(
                f"{path}, line {number}: adapter {named!r} is not loaded; loaded: {', '.join(adapters) or 'none'}"
            )
        answer = entry.get("answer")
        for adapter in (named,) if "adapter" in entry else (None, *adapters):
            suite.questions.append(question(encode, entry["prompt"], answer, adapter))
            tokens = encode(entry["prompt"] + (f" {answer.strip()}" if answer else ""))
            suite.documents.append(Document(tokens[: limits.longest], adapter))
    if not suite.questions:
        raise ValueError(f"{path} holds no prompts; give one a line")
    suite.questions = _first_of_each(suite.questions, limits.tasks)
    suite.documents = _first_of_each(suite.documents, limits.documents)
    return suite


def corpus_suite(limits: Limits, encode: Callable[[str], list[int]], adapters: Sequence[str]) -> Suite:
    """Return held-out sources of the standard library, read by the base model and by each adapter."""
    texts = [encode(text)[: limits.longest] for text in library_documents("held_out", limits.documents)]
    return Suite(
        "the standard library's sources", [Document(text, adapter) for adapter in (None, *adapters) for text in texts]
    )


def question(
    encode: Callable[[str], Sequence[int]], prompt: str, answer: str | None, adapter: str | None, group: str = ""
) -> Question:
    """Return the question as token ids, with room for its answer."""
    expected = None if answer is None else answer.strip()
    room = OPEN_TOKENS if expected is None else len(encode(f" {expected}")) + EXTRA_TOKENS
    return Question(encode(prompt), expected, room, adapter, group)


def shuffled(count: int, seed: int) -> list[int]:
    """Return a random order of the questions, so that batches mix adapters and lengths."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _first_of_each(values: list[T], count: int) -> list[T]:
    """Return the first `count` values of each adapter."""
    seen: dict[str, int] = {}
    chosen = []
    for value in values:
        seen[value.label] = seen.get(value.label, 0) + 1
        if seen[value.label] <= count:
            chosen.append(value)
    return chosen


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    if not line.lstrip().startswith("{"):
        return {"prompt": line}
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f'{path}, line {number}: not JSON ({error.msg}); a line that begins with {{ is read as {{"prompt": ...}}'
        ) from error
    if (
        not isinstance(entry.get("prompt"), str)
        or not entry["prompt"]
        or not isinstance(entry.get("answer"), (str, type(None)))
    ):
        raise ValueError(f'{path}, line {number}: needs a text "prompt" and, if anything, a text "answer"')
    return dict(entry)
