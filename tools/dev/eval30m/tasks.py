"""Questions with exact answers: `TASKS[name].items(count, seed, split)`; one adapter per task answers them.

Prompts are terse: only the adapter knows the task. The base model learns the same skills with the instruction written
out (`Task.instructed`), so that an adapter can build on them and still changes every answer.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ...eval.real.tasks import TASKS as REAL_TASKS
from ...eval.real.tasks import is_test, orders
from .needles import asked_openly, retrieval_question

Split = Literal["train", "test"]
Maker = Callable[..., tuple[str, str]]
NAMES = "abcdxyz"


@dataclass(frozen=True)
class Item:
    """One question; the model puts a space before `answer`."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A kind of question.

    adapter        name of its adapter
    instruction    line before the prompt for the base model
    make           (random source, level) -> (prompt, answer)
    train_levels   trained difficulties (digits, lengths, statements ...), equally often
    test_levels    tested difficulties in turn, chosen so that bf16 answers 60-90% of all items right
    lesson         maker and levels of the base model, if they differ from the adapter's
    hashed         the hash of a prompt decides its split; otherwise `make` takes the split as a third argument
    """

    adapter: str
    instruction: str
    make: Maker
    train_levels: tuple[int, ...]
    test_levels: tuple[int, ...]
    lesson: tuple[Maker, tuple[int, ...]] | None = None
    hashed: bool = True

    def items(self, count: int, seed: int, split: Split) -> list[Item]:
        """Return `count` different items, the same for the same arguments; no prompt is in both splits.

        Levels take turns. Raises ValueError if too few items exist.
        """
        source = random.Random(f"{self.adapter} {seed} {split}")
        chosen: dict[str, Item] = {}
        endless, repeated = self.endless(source, split), 0
        while len(chosen) < count:
            item = next(endless)
            if item.prompt not in chosen:
                chosen[item.prompt] = item
            elif (repeated := repeated + 1) > 20 * count + 1000:
                raise ValueError(f"task {self.adapter!r} has fewer than {count} {split} items: ask for fewer")
        return list(chosen.values())

    def foundation(self) -> "Task":
        """Return the task of the base model."""
        return replace(self, make=self.lesson[0], train_levels=self.lesson[1]) if self.lesson else self

    def instructed(self, item: Item) -> Item:
        """Return the question in the words of the base model."""
        prompt = asked_openly(item.prompt) if not self.hashed else f"# {self.instruction}\n{item.prompt}"
        return Item(prompt, item.answer)

    def endless(self, source: random.Random, split: Split = "train") -> Iterator[Item]:
        """Yield items without end, some of them repeatedly."""
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}, and must be 'train' or 'test'")
        test = split == "test"
        levels = self.test_levels if test else self.train_levels
        turn, misses = 0, 0
        while True:
            level = levels[turn % len(levels)]
            prompt, answer = self.make(source, level) if self.hashed else self.make(source, level, test)
            if not self.hashed or is_test(prompt) == test:
                turn, misses = turn + 1, 0
                yield Item(prompt, answer)
            elif (misses := misses + 1) > 10_000:
                raise ValueError(f"task {self.adapter!r} has no {split} item of level {level}: leave that level out")


def arithmetic(source: random.Random, level: int) -> tuple[str, str]:
    """Add or subtract two numbers of up to `level` digits, or multiply one by a digit."""
    kind = source.choice("+++---*")
    if kind == "*":
        first, second = source.randrange(10 ** (level - 1), 10**level), source.randrange(2, 10)
        return f"{first}*{second} =>", str(first * second)
    first = source.randrange(10 ** (level - 1), 10**level)
    second = source.randrange(10 ** max(level - 2, 0), 10**level)
    if kind == "-":
        first, second = max(first, second), min(first, second)
        return f"{first}-{second} =>", str(first - second)
    return f"{first}+{second} =>", str(first + second)


def long_arithmetic(source: random.Random, level: int) -> tuple[str, str]:
    """As `arithmetic`, and in a fifth of the cases add three numbers, which is harder."""
    if source.random() < 0.8:
        return arithmetic(source, level)
    first, second, third = (source.randrange(10 ** max(level - 2, 0), 10**level) for _ in range(3))
    if source.random() < 0.5 and first + second >= third:
        return f"{first}+{second}-{third} =>", str(first + second - third)
    return f"{first}+{second}+{third} =>", str(first + second + third)


def programs(source: random.Random, level: int) -> tuple[str, str]:
    """Run valid Python: two assignments, `level` - 1 computations, and a print; every value is a digit."""
    return _program(source, level, products=True)


def programs_without_products(source: random.Random, level: int) -> tuple[str, str]:
    """As `programs`, with sums, maxima and conditions only."""
    return _program(source, level, products=False)


def _program(source: random.Random, level: int, products: bool) -> tuple[str, str]:
    names = source.sample(NAMES, 3)
    values: dict[str, int] = {}
    lines = []
    for name in names[:2]:
        values[name] = source.randrange(10)
        lines.append(f"{name} = {values[name]}")
    for _ in range(level - 1):
        known = list(values)
        target, left, right = source.choice(names), source.choice(known), source.choice(known)
        kind, constant = source.randrange(5) if products else source.choice((0, 1, 3, 4)), source.randrange(1, 10)
        if kind == 0:
            values[target] = (values[left] + values[right]) % 10
            lines.append(f"{target} = ({left} + {right}) % 10")
        elif kind == 1:
            values[target] = (values[left] + constant) % 10
            lines.append(f"{target} = ({left} + {constant}) % 10")
        elif kind == 2:
            values[target] = values[left] * constant % 10
            lines.append(f"{target} = {left} * {constant} % 10")
        elif kind == 3:
            values[target] = max(values[left], values[right])
            lines.append(f"{target} = max({left}, {right})")
        else:
            target = source.choice(known)
            if values[left] > constant:
                values[target] = values[right]
            lines.append(f"if {left} > {constant}: {target} = {right}")
    result = source.choice(list(values))
    return "\n".join([*lines, f"print({result})"]) + "\n=>", str(values[result])


_ARITHMETIC = (arithmetic, (1, 2, 2, 3, 4, 5))
_PROGRAMS = (programs, (2, 3, 4, 5, 6))
TASKS: dict[str, Task] = {
    task.adapter: task
    for task in (
        Task("arithmetic", "compute", long_arithmetic, (2, 3, 4, 5), (3, 4, 5), _ARITHMETIC),
        Task("sorting", "sort the numbers, smallest first", *REAL_TASKS["sorting"], (14, 16, 18)),
        Task("strings", "transform the letters", *REAL_TASKS["strings"], (12, 13, 14)),
        Task(
            "programs",
            "run the program and give what it prints",
            programs_without_products,
            (1, 2, 3, 4),
            (2, 3, 4, 5),
            _PROGRAMS,
        ),
        Task("json", "extract the order as JSON", *REAL_TASKS["json"], (1, 1, 1, 2), (orders, (1, 2, 3, 4))),
        Task(
            "retrieval",
            "look the code up",
            retrieval_question,
            (256, 512, 1024, 2048, 4096),
            (512, 1024, 2048, 4096),
            hashed=False,
        ),
    )
}
