"""The ordered list of attacks; each takes the target and a seeded source, and returns attempts and problems."""

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....runtime.api.errors import RequestError, ServerError
from ....runtime.api.sampling_params import SamplingParams
from ....runtime.client.client import Client
from . import directories, peers
from .served import ServedDemo

Outcome = tuple[int, list[str]]
RESTART_SECONDS = 60.0
CHILDREN = ("batcher", "GPU process")
ALL_AT_ONCE = 0.25
"""Share of kills of all children at once."""


@dataclass(frozen=True)
class Target:
    """The server under attack, a valid adapter to make hostile ones of, and the processes that may be killed."""

    served: ServedDemo
    honest_adapter: Path
    victims: Sequence[str] = CHILDREN


@dataclass(frozen=True)
class Attack:
    """An attack; `kills`: it kills processes, so that their death is no finding."""

    name: str
    run: Callable[[Target, random.Random], Outcome]
    kills: bool = False


def kill(served: ServedDemo, source: random.Random, roles: Sequence[str] = CHILDREN) -> int:
    """Kill one of the children, sometimes all, and wait until their replacements answer."""
    chosen = list(roles) if source.random() < ALL_AT_ONCE else [source.choice(roles)]
    running = served.processes()
    victims = {role: running[role] for role in chosen if role in running}
    if not victims:
        return 0
    served.killed_at = time.monotonic()
    for victim in victims.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    end = time.monotonic() + RESTART_SECONDS
    while served.alive and not _replaced(victims, served.processes()):
        if time.monotonic() > end:
            raise TimeoutError(f"the {' and the '.join(victims)} did not start again within {RESTART_SECONDS:g} s")
        time.sleep(0.05)
    served.wait()
    served.back_at = time.monotonic()
    served.outages.append(served.back_at - served.killed_at)
    return 1


def _replaced(victims: Mapping[str, int], running: Mapping[str, int]) -> bool:
    return all(running.get(role, victim) != victim for role, victim in victims.items())


def freeze_one(served: ServedDemo, source: random.Random, seconds: float = 3.0) -> int:
    """SIGSTOP one of the children, and SIGCONT it after `seconds`."""
    victim = served.processes().get(source.choice(CHILDREN))
    if victim is None:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(victim, signal.SIGCONT)
    served.wait()
    return 1


def _peer(attack: Callable[[str, random.Random], int]) -> Callable[[Target, random.Random], Outcome]:
    return lambda target, source: (attack(target.served.address, source), [])


def loads_and_unloads(target: Target, source: random.Random) -> Outcome:
    """Load, replace and unload one name eight times, as fast as the answers arrive."""
    folder = target.served.adapters / "churn"
    shutil.copytree(target.honest_adapter, folder, dirs_exist_ok=True)
    surprises = []
    try:
        with Client(target.served.address, call_timeout=30.0) as client:
            for _ in range(8):
                client.load_adapter("churn", folder, replace=True)
                if source.random() < 0.5:
                    client.load_adapter("churn", folder, replace=True)
                client.unload_adapter("churn")
            if "churn" in {adapter.name for adapter in client.list_adapters()}:
                surprises.append("an adapter that was unloaded is still listed")
    except TimeoutError:
        surprises.append("a load or unload without an answer")
    except (RequestError, ServerError) as problem:
        surprises.append(f"an honest load or unload was refused: {problem}")
    return 24, surprises


def full_disk(target: Target, source: random.Random) -> Outcome:
    """Load adapters and send prompts that may need new programs, while no file can be written."""
    target.served.full_disk(True)
    try:
        loads, surprises = loads_and_unloads(target, source)
        prompts, more = odd_prompts(target, source)
        return loads + prompts, surprises + more
    finally:
        target.served.full_disk(False)


def odd_prompts(target: Target, source: random.Random) -> Outcome:
    """Send one to eight prompts at once, of any length."""
    prompts = [" ".join(["word"] * source.randint(1, 60)) for _ in range(source.randint(1, 8))]
    try:
        with Client(target.served.address, call_timeout=30.0) as client:
            answers = client.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    except (RequestError, ServerError, TimeoutError) as problem:
        return len(prompts), [f"honest prompts were not answered: {problem}"]
    short = sum(len(answer.outputs[0].token_ids) != 4 for answer in answers)
    return len(prompts), [f"{short} of {len(prompts)} answers have other than 4 tokens"] * bool(short)


def damaged_cache(target: Target, source: random.Random) -> Outcome:
    """Damage half of the cache's files, then restart the GPU process."""
    damaged = damage(target.served.cache, source)
    kill(target.served, source, target.victims)
    return damaged, []


ATTACKS = (
    Attack("hostile frames", _peer(peers.hostile_frames)),
    Attack("half greetings", _peer(peers.half_greetings)),
    Attack("forged routing ids", _peer(peers.forged_identities)),
    Attack("endless parts", _peer(peers.endless_parts)),
    Attack("hang-ups", _peer(peers.hang_ups)),
    Attack("greedy client", _peer(peers.greedy_client)),
    Attack("large prompts", _peer(peers.large_prompts)),
    Attack("frozen client", _peer(peers.frozen_client)),
    Attack("silent crowd", _peer(peers.silent_crowd)),
    Attack(
        "hostile directories",
        lambda target, source: directories.hostile_directories(
            target.served.address, target.served.adapters, target.honest_adapter, source
        ),
    ),
    Attack("loads and unloads", loads_and_unloads),
    Attack("full disk", full_disk),
    Attack("frozen process", lambda target, source: (freeze_one(target.served, source), [])),
    Attack("killed process", lambda target, source: (kill(target.served, source, target.victims), []), kills=True),
    Attack("damaged cache", damaged_cache, kills=True),
)


def damage(cache: Path, source: random.Random) -> int:
    """Change half of the files of a cache (bits flipped, cut off, emptied, exchanged), and return their number."""
    files = sorted(path for path in cache.rglob("*") if path.is_file() and not path.is_symlink())
    chosen = source.sample(files, (len(files) + 1) // 2)
    for path in chosen:
        data = bytearray(path.read_bytes())
        kind = source.randrange(4)
        if kind == 0 and data:
            for _ in range(8):
                data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        elif kind == 1:
            del data[len(data) // 2 :]
        elif kind == 2:
            data = bytearray()
        else:
            data = bytearray(source.choice(files).read_bytes())
        path.write_bytes(data)
    return len(chosen)
