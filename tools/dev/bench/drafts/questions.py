"""Held-out questions for a bench of drafts, by adapter and task.

An adapter with the name of an evaluation task is asked test items of it, in the model's chat template if it has one.
The base model is asked the same tasks with the instruction, and continues held-out library sources. The demo model is
asked its facts.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .....runtime.demo_model import DEMO_MODEL
from .....runtime.text.chat_files import read_chat_templates
from .....runtime.text.chat_renderer import ChatRenderer
from .....runtime.text.prompts import without_special_tokens
from ....eval.corpus import documents
from ....eval.suite import SEED, Limits, demo_suite, file_suite
from ...eval30m.tasks import TASKS, Split

HELD_OUT = 64
"""Facts of the demo for each adapter that no draft is trained on."""
SOURCES = "sources"
SOURCE_CHARACTERS = 900
"""Characters of a library source to continue, about 250 tokens."""


@dataclass(frozen=True)
class Load:
    """Questions of one task to one adapter (None: the base model); `prompts` as `LLM.generate` takes them."""

    adapter: str | None
    task: str
    prompts: list[Any]

    @property
    def label(self) -> str:
        """Return adapter and task in a word or two."""
        return self.task if self.adapter == self.task else f"{self.adapter or 'base'}/{self.task}"


def questions(
    directory: Path,
    tokenizer: Any,
    adapters: Sequence[str],
    count: int,
    file: Path | None = None,
    split: Split = "test",
) -> list[Load]:
    """Return `count` questions of each adapter and task, or of each adapter from a file of prompts.

    The splits have different questions; a file has no split. Raises ValueError for adapters without a known task.
    """
    if file is not None:
        return _of_suite(file_suite(file, Limits(count, 0, 1 << 30), tokenizer.encode, adapters), file.name)
    if directory.resolve() == Path(DEMO_MODEL).resolve():
        asked = _of_suite(demo_suite(Limits(1 << 30, 0, 1 << 30), tokenizer.encode, adapters), "facts")
        mine = slice(0, min(count, HELD_OUT)) if split == "test" else slice(HELD_OUT, HELD_OUT + count)
        return [Load(load.adapter, load.task, load.prompts[mine]) for load in asked]
    unknown = sorted(set(adapters) - set(TASKS))
    if unknown:
        raise ValueError(f"no task is known for adapter {unknown[0]!r}: give prompts with --prompts FILE")
    return list(_of_tasks(directory, adapters, count, split))


def _of_suite(suite: Any, task: str) -> list[Load]:
    asked: dict[str | None, list[Any]] = {}
    for question in suite.questions:
        asked.setdefault(question.adapter, []).append({"prompt_token_ids": list(question.tokens)})
    return [Load(adapter, task, prompts) for adapter, prompts in asked.items()]


def _of_tasks(directory: Path, adapters: Sequence[str], count: int, split: Split) -> Iterator[Load]:
    renderer = ChatRenderer()
    templates = read_chat_templates(directory)

    def as_asked(texts: Sequence[str]) -> list[Any]:
        if not templates.templates:
            return list(texts)
        return [
            without_special_tokens(text)
            for text in renderer.prompts(templates, [[{"role": "user", "content": text}] for text in texts])
        ]

    try:
        texts = documents("held_out" if split == "test" else "train", count)
        yield Load(None, SOURCES, [text[:SOURCE_CHARACTERS] for text in texts])
        for name in [name for name in TASKS if name in adapters]:
            items = TASKS[name].items(2 * count, SEED, split)
            yield Load(name, name, as_asked([item.prompt for item in items[:count]]))
            instructed = [TASKS[name].instructed(item).prompt for item in items[count:]]
            yield Load(None, name, as_asked(instructed))
    finally:
        renderer.close()


def mixed(loads: Sequence[Load]) -> list[tuple[str | None, Any]]:
    """Return all adapters' questions as (adapter, prompt), shuffled with a fixed seed."""
    everything: list[tuple[str | None, Any]] = [
        (load.adapter, prompt) for load in loads if load.adapter is not None for prompt in load.prompts
    ]
    random.Random(SEED).shuffle(everything)
    return everything
