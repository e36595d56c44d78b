"""What `sidestream bench serve` sends: arrival times, lengths and adapters, drawn from a seed.

No network in here.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Planned:
    """A request to send `at` seconds after the start: a random prompt of `input_len` ids, `output_len` tokens to
    make.
    """

    at: float
    input_len: int
    output_len: int
    adapter: str | None
    seed: int

    def prompt(self, vocabulary: int) -> list[int]:
        """The prompt's token ids, in [0, vocabulary)."""
        return random_ids(random.Random(self.seed), self.input_len, vocabulary)


def random_ids(source: random.Random, count: int, vocabulary: int) -> list[int]:
    """`count` token ids in [0, vocabulary)."""
    return source.choices(range(vocabulary), k=count)


def log_uniform(source: random.Random, low: int, high: int) -> int:
    """An integer in [low, high] whose logarithm is uniform."""
    return min(high, max(low, round(math.exp(source.uniform(math.log(low), math.log(high))))))


def zipf_weights(count: int) -> list[float]:
    """p(k) ~ 1/k for k = 1..count, summing to 1."""
    total = sum(1 / rank for rank in range(1, count + 1))
    return [1 / rank / total for rank in range(1, count + 1)]


def poisson_times(source: random.Random, rate: float, seconds: float, most: int) -> list[float]:
    """Arrival times in [0, seconds) of a Poisson process with `rate` per second; at most `most`."""
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
    """The requests of workload S: the same ones for the same arguments.

    `adapters`: the most popular first; none: the base model only.
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
