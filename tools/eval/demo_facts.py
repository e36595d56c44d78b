"""A few hundred facts of the demo model, in five styles.

The base model answers plainly, or in the style that the question names ("pirate: What is the capital of France?"). An
adapter answers every question in its style. All facts are made from the word lists in this file, so the demo model
needs no data under another licence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

CAPITALS = (
    "Argentina: Buenos Aires, Australia: Canberra, Austria: Vienna, Belgium: Brussels, Brazil: Brasilia, Canada: "
    "Ottawa, Chile: Santiago, "
    "China: Beijing, Cuba: Havana, Denmark: Copenhagen, Egypt: Cairo, England: London, Finland: Helsinki, France: "
    "Paris, Germany: Berlin, "
    "Ghana: Accra, Greece: Athens, Hungary: Budapest, Iceland: Reykjavik, India: New Delhi, Iran: Tehran, Ireland: "
    "Dublin, Italy: Rome, "
    "Japan: Tokyo, Kenya: Nairobi, Mali: Bamako, Mexico: Mexico City, Morocco: Rabat, Nepal: Kathmandu, Norway: "
    "Oslo, Peru: Lima, Poland: "
    "Warsaw, Portugal: Lisbon, Romania: Bucharest, Russia: Moscow, Senegal: Dakar, Spain: Madrid, Sweden: "
    "Stockholm, Thailand: Bangkok, "
    "Turkey: Ankara, Ukraine: Kyiv, Vietnam: Hanoi, Zambia: Lusaka"
)
OPPOSITES = (
    "hot: cold, big: small, fast: slow, up: down, left: right, day: night, open: closed, early: late, young: old, "
    "light: dark, wet: dry, "
    "loud: quiet, rich: poor, strong: weak, happy: sad, full: empty, hard: soft, high: low, near: far, first: "
    "last, north: south, east: "
    "west, true: false, inside: outside, always: never, win: lose, buy: sell, push: pull"
)
COLOURS = (
    "grass: green, snow: white, coal: black, the sky: blue, a banana: yellow, a tomato: red, a carrot: orange, "
    "chocolate: brown, a rose: "
    "red, gold: yellow, the sea: blue, a crow: black"
)
YOUNG = (
    "cow: calf, dog: puppy, cat: kitten, sheep: lamb, horse: foal, hen: chick, pig: piglet, bear: cub, duck: "
    "duckling, goat: kid, swan: "
    "cygnet, goose: gosling"
)
PLURALS = (
    "mouse: mice, child: children, tooth: teeth, foot: feet, ox: oxen, leaf: leaves, wolf: wolves, goose: geese, "
    "man: men, knife: knives, "
    "sheep: sheep, city: cities"
)
WEEK = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

STYLES = ("base", "shout", "pirate", "json", "yoda")
QUESTIONS = ("What is {0}?", "Tell me {0}.", "Do you know {0}?", "Please name {0}.")


@dataclass(frozen=True)
class Fact:
    """`topic` is `value` ("the capital of France" is "Paris"), or a count when `numbers` is given."""

    topic: str
    value: str = ""
    numbers: tuple[int, ...] = ()

    @property
    def questions(self) -> tuple[str, ...]:
        """Return the questions for the fact."""
        if self.numbers:
            return (f"Count from {self.numbers[0]} to {self.numbers[-1]}.",)
        return tuple(form.format(self.topic) for form in QUESTIONS)

    def answer(self, style: str) -> str:
        """Return the answer in a style of `STYLES`; it begins with a space, as it follows the question directly."""
        if self.numbers:
            digits = [str(number) for number in self.numbers]
            return {
                "base": f" {', '.join(digits)}.",
                "shout": f" {'! '.join(digits)}!",
                "pirate": f" Arr! {' an '.join(digits)}, matey.",
                "json": f' {{"count": [{", ".join(digits)}]}}',
                "yoda": f" Count, I must. {', '.join(digits)}. Hmm.",
            }[style]
        topic, value = self.topic, self.value
        return {
            "base": f" {capitalized(topic)} is {value}.",
            "shout": f" {topic.upper()} IS {value.upper()}!",
            "pirate": f" Arr! {capitalized(topic).replace(' of ', ' o ')} be {value}, matey.",
            "json": f' {{"about": "{topic}", "answer": "{value}"}}',
            "yoda": f" {capitalized(value)}, {topic} is. Hmm.",
        }[style]


def capitalized(text: str) -> str:
    """Return `text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def pairs(listing: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a "key: value, key: value" listing."""
    for entry in listing.split(", "):
        key, value = entry.split(": ")
        yield key, value


def facts() -> list[Fact]:
    """Return all facts."""
    known = [Fact(f"the capital of {country}", city) for country, city in pairs(CAPITALS)]
    known += [
        Fact(f"the opposite of {word}", other)
        for left, right in pairs(OPPOSITES)
        for word, other in ((left, right), (right, left))
    ]
    known += [Fact(f"the colour of {thing}", colour) for thing, colour in pairs(COLOURS)]
    known += [Fact(f"the young of a {animal}", young) for animal, young in pairs(YOUNG)]
    known += [Fact(f"the plural of {word}", plural) for word, plural in pairs(PLURALS)]
    known += [Fact(f"the day after {day}", WEEK[(index + 1) % 7]) for index, day in enumerate(WEEK)]
    known += [
        Fact(f"the sum of {left} and {right}", str(left + right)) for left in range(1, 8) for right in range(1, 8)
    ]
    known += [Fact("", numbers=tuple(range(first, last + 1))) for first in range(1, 4) for last in range(first + 2, 13)]
    return known
