"""Questions about numbers: sums, and small Python programs that print a number.

A maker takes (random source, level) and returns (prompt, answer).
"""

import random

NAMES = "abcdxyz"


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
