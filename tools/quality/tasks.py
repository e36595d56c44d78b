"""Questions with exact answers: `TASKS[name].items(count, seed, split)`; one adapter per task answers them.

A task's prompt is terse: only its adapter knows what is wanted. The base model learns the same skills with the
instruction written out (`Task.instructed`), so that an adapter has something to build on and yet changes every answer.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from . import task_numbers, task_text
from .needle import asked_openly, retrieval_question

Split = Literal["train", "test"]
Maker = Callable[[random.Random, int, bool], tuple[str, str]]

TEST_SHARE = 0.1


@dataclass(frozen=True)
class Item:
    """One question: `prompt` as given to the model, `answer` without the space that the model puts before it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A kind of question.

    adapter        name of the adapter that was trained on it
    instruction    what the base model is told before the prompt
    make           (random source, level, whether for the test split) -> (prompt, answer)
    train_levels   difficulties that the adapter is trained on (digits, lengths, statements ...), all equally often
    test_levels    difficulties asked, taking turns, some of them between or beyond the trained ones: so chosen, after a
                   look at the accuracy by level, that bf16 is right in 60-90% of all items; a level named more often is
                   asked more often
    max_new_tokens no answer is longer than this
    lesson         maker and levels of what the base model learns, where that differs from the adapter's
    hashed         the prompt's hash decides its side of the split; otherwise `make` draws from texts that are split
                   themselves
    """

    adapter: str
    instruction: str
    make: Maker
    train_levels: tuple[int, ...]
    test_levels: tuple[int, ...]
    max_new_tokens: int
    hashed: bool = True
    lesson: tuple[Maker, tuple[int, ...]] | None = None

    def items(self, count: int, seed: int, split: Split) -> list[Item]:
        """`count` different items; the same for the same arguments. No prompt is ever on both sides of the split."""
        return [
            item
            for _, item in self.levelled(count, seed, split, self.test_levels if split == "test" else self.train_levels)
        ]

    def levelled(self, count: int, seed: int, split: Split, levels: tuple[int, ...]) -> list[tuple[int, Item]]:
        """`count` different items with their levels, which take turns. Raises ValueError where so many do not exist."""
        source = random.Random(f"{self.adapter} {seed} {split}")
        seen: set[str] = set()
        chosen: list[tuple[int, Item]] = []
        endless, repeated = self._endless(source, split, levels), 0
        while len(chosen) < count:
            level, item = next(endless)
            if item.prompt not in seen:
                seen.add(item.prompt)
                chosen.append((level, item))
            elif (repeated := repeated + 1) > 20 * count + 1000:
                raise ValueError(
                    f"task {self.adapter!r} has fewer than {count} {split} items of levels {levels}: ask for fewer "
                    "or for more levels"
                )
        return chosen

    def foundation(self) -> "Task":
        """The task as the base model learns it."""
        return replace(self, make=self.lesson[0], train_levels=self.lesson[1]) if self.lesson else self

    def instructed(self, item: Item) -> Item:
        """The same question as the base model knows it."""
        return Item(
            asked_openly(item.prompt) if self.adapter == "retrieval" else f"# {self.instruction}\n{item.prompt}",
            item.answer,
        )

    def endless(self, source: random.Random) -> Iterator[Item]:
        """Training items without end, some of them repeatedly."""
        return (item for _, item in self._endless(source, "train", self.train_levels))

    def _endless(self, source: random.Random, split: Split, levels: tuple[int, ...]) -> Iterator[tuple[int, Item]]:
        if split not in ("train", "test"):
            raise ValueError(f"split {split!r} is not known: use 'train' or 'test'")
        test = split == "test"
        turn, misses = 0, 0
        while True:
            level = levels[turn % len(levels)]
            prompt, answer = self.make(source, level, test)
            if not self.hashed or is_test(prompt) == test:
                turn, misses = turn + 1, 0
                yield level, Item(prompt, answer)
            elif (misses := misses + 1) > 10_000:
                raise ValueError(f"task {self.adapter!r} has no {split} item of level {level}: leave that level out")


def is_test(prompt: str) -> bool:
    """Whether a prompt belongs to the test split."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest()) < TEST_SHARE * 2**32


def right(item: Item, completion: str) -> bool:
    """Exact match; white space around the completion does not count."""
    return completion.strip() == item.answer


TASKS: dict[str, Task] = {
    task.adapter: task
    for task in (
        Task(
            "arithmetic",
            "compute",
            task_numbers.long_arithmetic,
            (2, 3, 4, 5),
            (3, 4, 5),
            12,
            lesson=(task_numbers.arithmetic, (1, 2, 2, 3, 4, 5)),
        ),
        Task(
            "sorting",
            "sort the numbers, smallest first",
            task_numbers.sorting,
            (4, 6, 8, 10, 12, 14, 16),
            (14, 16, 18),
            64,
        ),
        Task("strings", "transform the letters", task_text.strings, (4, 6, 8, 10, 12, 14), (12, 13, 14), 40),
        Task(
            "programs",
            "run the program and give what it prints",
            task_numbers.programs_without_products,
            (1, 2, 3, 4),
            (2, 3, 4, 5),
            8,
            lesson=(task_numbers.programs, (2, 3, 4, 5, 6)),
        ),
        Task(
            "json",
            "extract the order as JSON",
            task_text.numbered_extraction,
            (1, 2, 3, 4),
            (1, 1, 1, 2),
            80,
            lesson=(task_text.extraction, (1, 2, 3, 4)),
        ),
        Task(
            "retrieval",
            "look the code up",
            retrieval_question,
            (256, 512, 1024, 2048, 4096),
            (512, 1024, 2048, 4096),
            12,
            hashed=False,
        ),
    )
}
