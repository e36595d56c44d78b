"""Generated questions that the adapters of the real model learn: sorting, letters, and orders as JSON.

A maker takes (random source, level) and returns (prompt, answer); the level sets the length of the question.
"""

import hashlib
import json
import random
from collections.abc import Callable

TEST_SHARE = 0.1
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FIRST_NAMES = (
    "Ada Alan Barbara Carl Dana Edith Frank Grace Hugo Ida Jonas Karen Linus Maria Niels Olga Paul Rosa Simon Tova"
)
_LAST_NAMES = (
    "Archer Baker Carter Dyer Fisher Gardner Hunter Keller Mason Miller Parker Potter Shepherd Smith "
    "Taylor Turner Walker Weaver"
)
_GOODS = "lamps chairs books clocks boxes tables bottles maps pens mirrors brushes carpets"
_MONTHS = "January February March April May June July August September October November December"
FIRST_NAMES, LAST_NAMES, GOODS, MONTHS = (words.split() for words in (_FIRST_NAMES, _LAST_NAMES, _GOODS, _MONTHS))
SENTENCES = (
    "{name} bought {count} {goods} at {price} each on {date} (order {number}).",
    "On {date}, order {number} went to {name}: {count} {goods}, {price} a piece.",
    "Order {number}: {count} {goods} for {name}; the price of one was {price}, and it was paid on {date}.",
)
NUMBERED_SENTENCES = (
    *SENTENCES,
    "Order {number} was by {name}, who paid for it on {date}: {count} {goods} at {price} each.",
    "Order {number} ({name}): {count} {goods} on {date}, each for {price}.",
    "Order {number}, placed on {date}, was for {count} {goods} at {price}; {name} took them.",
    "Order {number}: {name}, {count} {goods}, {price} a piece, {date}.",
    "Order {number}: on {date}, {count} {goods} for {name}, who paid {price} for one.",
)


def is_test(prompt: str) -> bool:
    """Return whether a prompt belongs to the test split; its hash decides."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest()) < TEST_SHARE * 2**32


def sorting(source: random.Random, level: int) -> tuple[str, str]:
    """Sort `level` numbers of one or two digits; numbers may repeat."""
    numbers = [source.randrange(100) for _ in range(level)]
    return " ".join(map(str, numbers)) + " =>", " ".join(map(str, sorted(numbers)))


def strings(source: random.Random, level: int) -> tuple[str, str]:
    """Apply one or two operations in turn to `level` letters separated by spaces."""
    letters = source.choices(LETTERS, k=level)
    names = source.sample(sorted(_OPERATIONS), 1 + (source.random() < 0.25))
    result = letters
    for name in names:
        result = _OPERATIONS[name](result)
    return f"{' '.join(names)}: {' '.join(letters)} =>", " ".join(result)


def _swap_pairs(letters: list[str]) -> list[str]:
    return [letters[index ^ 1] if index ^ 1 < len(letters) else letters[index] for index in range(len(letters))]


def _next(letters: list[str]) -> list[str]:
    return [LETTERS[(LETTERS.index(letter) + 1) % 26] for letter in letters]


_OPERATIONS: dict[str, Callable[[list[str]], list[str]]] = {
    "reverse": lambda letters: letters[::-1],
    "rotate": lambda letters: letters[1:] + letters[:1],
    "swap": _swap_pairs,
    "next": _next,
    "evens": lambda letters: letters[::2],
    "consonants": lambda letters: [letter for letter in letters if letter not in "aeiou"] or letters,
}


def numbered_orders(source: random.Random, level: int) -> tuple[str, str]:
    """Write an order as `orders` does, in sentences that mostly begin with the order's number."""
    return orders(source, level, NUMBERED_SENTENCES)


def orders(source: random.Random, level: int, sentences: tuple[str, ...] = SENTENCES) -> tuple[str, str]:
    """Write one of `level` orders as JSON, with its date in ISO form and its total computed."""
    lines, records = [], []
    for number in source.sample(range(10000, 100000), level):
        name = f"{source.choice(FIRST_NAMES)} {source.choice(LAST_NAMES)}"
        goods, count, price = source.choice(GOODS), source.randrange(2, 10), source.randrange(11, 100)
        year, month, day = source.randrange(1950, 2030), source.randrange(1, 13), source.randrange(1, 29)
        date = f"{day} {MONTHS[month - 1]} {year}"
        lines.append(
            source.choice(sentences).format(name=name, count=count, goods=goods, price=price, date=date, number=number)
        )
        iso = f"{year}-{month:02}-{day:02}"
        records.append({"order": number, "name": name, "date": iso, "goods": goods, "total": count * price})
    record = source.choice(records)
    return "\n".join(lines) + f"\norder {record['order']} =>", json.dumps(record)


TASKS: dict[str, tuple[Callable[[random.Random, int], tuple[str, str]], tuple[int, ...]]] = {
    "strings": (strings, (4, 6, 8, 10, 12, 14)),
    "sorting": (sorting, (4, 6, 8, 10, 12, 14, 16)),
    "json": (numbered_orders, (1, 2, 3, 4)),
}
"""Maker and levels of each adapter's task; the levels take turns."""


def training_questions(name: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Return `count` different (prompt, answer) pairs of a task's training split, the same for the same arguments."""
    make, levels = TASKS[name]
    source, turn = random.Random(f"{name} {seed} train"), 0
    chosen: dict[str, str] = {}
    while len(chosen) < count:
        prompt, answer = make(source, levels[turn % len(levels)])
        if not is_test(prompt):
            turn += 1
            chosen.setdefault(prompt, answer)
    return list(chosen.items())
