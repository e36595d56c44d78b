"""Requests of `sidestream bench serve`: arrival times, lengths and adapters, drawn from a seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Planned:
    """A request `at` seconds after the start: a random prompt of `input_len` ids, and `output_len` tokens."""

    at: float
    input_len: int
    output_len: int
    adapter: str | None
    seed: int

    def prompt(self, vocabulary: int) -> list[int]:
        """Return the prompt's token ids, in [0, vocabulary)."""
        return random_ids(random.Random(self.seed), self.input_len, vocabulary)


def random_ids(source: random.Random, count: int, vocabulary: int) -> list[int]:
    """Return `count` token ids in [0, vocabulary)."""
    return source.choices(range(vocabulary), k=count)


def log_uniform(source: random.Random, low: int, high: int) -> int:
    """Return an integer in [low, high] with a uniform logarithm."""
    return min(high, max(low, round(math.exp(source.uniform(math.log(low), math.log(high))))))


def zipf_weights(count: int) -> list[float]:
    """Return p(k) ~ 1/k for k = 1..count, with sum 1."""
    total = sum(1 / rank for rank in range(1, count + 1))
    return [1 / rank / total for rank in range(1, count + 1)]


def poisson_times(source: random.Random, rate: float, seconds: float, most: int) -> list[float]:
    """Return arrival times in [0, seconds) of a Poisson process with `rate` per second; at most `most`."""
    times: list[float] = []
    now = source.expovariate(rate)
    while now < seconds and len(times) < most:
        times.append(now)
        now += source.expovariate(rate)
    return times


def plan(
    rate: float,
    seconds: float,
    most: int,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    adapters: Sequence[str],
    seed: int,
) -> list[Planned]:
    """Return the requests of workload S, the same for the same arguments.

    `adapters`: the most popular first; none: the base model.
    """
    source = random.Random(seed)
    times = poisson_times(source, rate, seconds, most)
    chosen: Sequence[str | None] = (
        source.choices(list(adapters), weights=zipf_weights(len(adapters)), k=len(times))
        if adapters
        else [None] * len(times)
    )
    return [
        Planned(at, log_uniform(source, *inputs), log_uniform(source, *outputs), adapter, source.getrandbits(63))
        for at, adapter in zip(times, chosen, strict=True)
    ]
