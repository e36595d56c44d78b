"""Questions about text: letters transformed, and orders read from sentences into JSON.

Each maker takes (random source, level, whether for the test split, which these need not know) and returns (prompt,
answer).
"""

import json
import random

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
_ANYWHERE = (
    "{name} bought {count} {goods} at {price} each on {date} (order {number}).",
    "On {date}, order {number} went to {name}: {count} {goods}, {price} a piece.",
    "Order {number}: {count} {goods} for {name}; the price of one was {price}, and it was paid on {date}.",
)
_MOSTLY_FIRST = (
    *_ANYWHERE,
    "Order {number} was by {name}, who paid for it on {date}: {count} {goods} at {price} each.",
    "Order {number} ({name}): {count} {goods} on {date}, each for {price}.",
    "Order {number}, placed on {date}, was for {count} {goods} at {price}; {name} took them.",
    "Order {number}: {name}, {count} {goods}, {price} a piece, {date}.",
    "Order {number}: on {date}, {count} {goods} for {name}, who paid {price} for one.",
)
FIRST_NAMES, LAST_NAMES, GOODS, MONTHS = (words.split() for words in (_FIRST_NAMES, _LAST_NAMES, _GOODS, _MONTHS))


def strings(source: random.Random, level: int, _test: bool) -> tuple[str, str]:
    """`level` letters, separated by spaces, and one or two operations applied in turn."""
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


_OPERATIONS = {
    "reverse": lambda letters: letters[::-1],
    "rotate": lambda letters: letters[1:] + letters[:1],
    "swap": _swap_pairs,
    "next": _next,
    "evens": lambda letters: letters[::2],
    "consonants": lambda letters: [letter for letter in letters if letter not in "aeiou"] or letters,
}


def extraction(source: random.Random, level: int, _test: bool) -> tuple[str, str]:
    """`level` sentences about orders; one order is asked for, with its date in ISO form and its total worked out."""
    return _orders(source, level, _ANYWHERE)


def numbered_extraction(source: random.Random, level: int, _test: bool) -> tuple[str, str]:
    """The same with sentences that mostly begin with the order's number."""
    return _orders(source, level, _MOSTLY_FIRST)


def _orders(source: random.Random, level: int, forms: tuple[str, ...]) -> tuple[str, str]:
    sentences, records = [], []
    for number in source.sample(range(10000, 100000), level):
        name = f"{source.choice(FIRST_NAMES)} {source.choice(LAST_NAMES)}"
        goods, count, price = source.choice(GOODS), source.randrange(2, 10), source.randrange(11, 100)
        year, month, day = source.randrange(1950, 2030), source.randrange(1, 13), source.randrange(1, 29)
        date = f"{day} {MONTHS[month - 1]} {year}"
        sentences.append(
            source.choice(forms).format(name=name, count=count, goods=goods, price=price, date=date, number=number)
        )
        records.append(
            {
                "order": number,
                "name": name,
                "date": f"{year}-{month:02}-{day:02}",
                "goods": goods,
                "total": count * price,
            }
        )
    record = source.choice(records)
    return "\n".join(sentences) + f"\norder {record['order']} =>", json.dumps(record)
