"""`python -m sidestream.tools.chaos --minutes N [--seed S]`: exit code 1 if anything was found.

The demo model is served in fp32 on the CPU, where an answer does not depend on what else is in the batch. Rounds of
all attacks, in an order drawn from the seed, go on until the time is over; a round that has begun is finished. What
counts as a finding: a wrong or lost answer, a process that died though nobody killed it, an attack that got what it
should not get, growth, pages that stay taken, tracebacks in the log, and what is left after the end.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ...runtime.client.client import Client
from ..options.engine import DEMO_MODEL
from .attacks import ATTACKS, Attack, Target
from .healthy import HealthyClients
from .lives import Lives
from .report import Line, delays, growth, table
from .served import Holdings, ServedDemo

FLAGS = ("--precision", "fp32", "--max-model-len", "256", "--num-kv-pages", "64", "--max-num-seqs", "8")
IDLE_SECONDS = 60.0
ANSWER_SECONDS = 60.0


def attack_once(attack: Attack, target: Target, source: random.Random, line: Line, healthy: HealthyClients) -> None:
    """One round of one attack; afterwards the server must answer a healthy client, with the processes that it had."""
    before = target.served.processes()
    line.rounds += 1
    try:
        attempts, surprises = attack.run(target, source)
        line.attempts += attempts
        line.findings += surprises
        target.served.wait()
    except TimeoutError as problem:
        line.findings.append(str(problem))
        return
    after = target.served.processes()
    if not attack.kills and before != after:
        line.findings.append(f"processes died: {sorted(before.keys() - after.keys()) or 'and were started again'}")
        return
    if not healthy.await_answer(ANSWER_SECONDS):
        line.findings.append(f"no healthy client was answered within {ANSWER_SECONDS:g} s afterwards")
        return
    line.survived += 1


def pages_used_when_idle(address: str) -> int:
    """KV pages that requests hold although none is open, after at most IDLE_SECONDS of waiting."""
    end = time.monotonic() + IDLE_SECONDS
    with Client(address) as client:
        while True:
            stats = client.stats()
            if not stats["requests_open"] or time.monotonic() > end:
                return int(stats["pages_in_use"])
            time.sleep(0.2)


def too_soon(served: ServedDemo, seconds: float) -> bool:
    """Whether the last kill (or the start) is less than `seconds` ago."""
    return time.monotonic() - (served.killed_at or served.begun) < seconds


def settle(target: Target) -> dict[str, Holdings]:
    """What the processes hold when the dust has settled."""
    target.served.wait()
    time.sleep(1.0)
    return target.served.holdings()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: 0 without findings, 1 with any."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, metavar="N", help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws everything (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="healthy clients (default: %(default)s)")
    parser.add_argument(
        "--kill-every",
        type=float,
        default=0.0,
        metavar="MINUTES",
        help="attacks that kill wait so long after the last one, so that processes grow old (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="ATTACK", choices=[attack.name for attack in ATTACKS], help="these attacks alone"
    )
    options = parser.parse_args(arguments)
    chosen = [attack for attack in ATTACKS if options.only is None or attack.name in options.only]
    source = random.Random(options.seed)
    lines = {attack.name: Line(attack.name) for attack in chosen}
    findings: list[str] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, ServedDemo(Path(folder), *FLAGS) as served:
        target = Target(served, DEMO_MODEL / "adapters" / "pirate")
        print(f"served after {served.wait():.1f} s", flush=True)
        first: dict[str, Holdings] = {}
        lives = Lives()
        with HealthyClients(served, DEMO_MODEL / "prompts.json", options.clients) as healthy:
            end = time.monotonic() + options.minutes * 60
            while True:
                for attack in source.sample(chosen, len(chosen)):
                    if attack.kills and too_soon(served, options.kill_every * 60):
                        continue
                    begun = time.monotonic()
                    attack_once(attack, target, source, lines[attack.name], healthy)
                    print(f"{attack.name:<22}{time.monotonic() - begun:6.1f} s  {dict(healthy.seen)}", flush=True)
                last = settle(target)
                lives.look(time.monotonic(), served.processes())
                first = first or last
                if time.monotonic() >= end or not served.alive:
                    break
        findings += growth(first, last) + lives.findings()
        findings += [f"a wrong answer: {wrong}" for wrong in healthy.wrong[:8]]
        findings += [f"{healthy.seen['lost']} requests were lost"] if healthy.seen["lost"] else []
        used = pages_used_when_idle(served.address)
        findings += [f"{used} KV pages stay taken"] if used else []
        left = served.stop()
        findings += [f"left after the end: {thing}" for thing in left]
        findings += [f"a traceback in the log: {text}" for text in dict.fromkeys(served.tracebacks())]
    timed = delays("a process was killed; its clients heard", healthy.told_after)
    timed += delays("a process was killed; served again", served.outages)
    timed = [f"{'':<44}{'times':>6}{'median s':>10}{'longest s':>10}", *timed] if timed else []
    print(table(lines, healthy.seen, findings, first, last, lives.table() + timed))
    return int(bool(findings) or any(line.findings for line in lines.values()) or not healthy.seen["right"])
