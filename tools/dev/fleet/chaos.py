"""`python -m sidestream.tools.dev.fleet.chaos`: kill -9 of replicas and whole nodes of a fleet, while clients stream.

A cluster of several raylets on this machine, one engine of the demo model on each, and clients over HTTP. Every answer
is compared with the fleet's before the first kill. The HTTP process is on a node of its own that is not killed: its
clients would have to ask again, as with any proxy.
"""

import argparse
import contextlib
import logging
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import structs

from ....runtime.fleet.options import FleetOptions
from ..chaos.http_clients import Clients, Question, Seen, answers, questions
from ..chaos.served import command_line, descendants
from ..chaos.served_gateway import statuses

QUESTIONS = 24
UP_SECONDS = 1800.0
IDLE_SECONDS = 5.0
VICTIMS = ("replica", "GPU process", "node")
_PATIENT = {"RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120"}
"""Longer health checks: on a full machine Ray takes a slow HTTP process for dead after ten seconds."""
_GPU_PROCESS = "sidestream.runtime.server.gpu_process"


class Fleet:
    """A fleet of `count` engines, each on a node of its own. Secure Ray before."""

    def __init__(self, count: int, port: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "resources": {"http": 8}, "include_dashboard": False},
        )
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self.nodes = [self._node() for _ in range(count)]
        self.options = FleetOptions(
            name="chaos",
            port=port,
            cpus=2,
            min_replicas=count,
            max_replicas=count,
            target_requests=4,
            scale_up_seconds=1,
            idle_seconds=IDLE_SECONDS,
            patience_seconds=UP_SECONDS,
            ingress_resources={"http": 1},
            proxy_location="HeadOnly",  # all nodes are this machine, with one port
        )

    def _node(self) -> Any:
        return self._cluster.add_node(wait=False, num_cpus=2, include_dashboard=False)

    def deploy(self, **changes: Any) -> None:
        """Start or change the fleet."""
        from ....runtime.fleet.application import deploy

        self.options = structs.replace(self.options, **changes)
        deploy(self.options)

    def until(self, true: Callable[[list[str]], bool], what: str) -> float:
        """Wait, and return the seconds. Raises TimeoutError."""
        started = time.monotonic()
        while time.monotonic() - started < UP_SECONDS:
            found = statuses(self.options.port)
            if found is not None and true(found):
                return time.monotonic() - started
            time.sleep(0.2)
        raise TimeoutError(f"{what}: not within {UP_SECONDS:g} s")

    def kill(self, victim: str, source: random.Random) -> bool:
        """Send SIGKILL; return False without a target. A new node replaces a killed one."""
        if victim == "node":
            place = source.randrange(len(self.nodes))
            self._cluster.remove_node(self.nodes[place], allow_graceful=False)
            self.nodes[place] = self._node()
            return True
        pids = processes(f"ray::ServeReplica:{self.options.name}:engine" if victim == "replica" else _GPU_PROCESS)
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(source.choice(pids), signal.SIGKILL)
        return bool(pids)

    def close(self) -> None:
        """Stop the fleet and its cluster."""
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


def processes(words: str) -> list[int]:
    """Return ids of descendants with these words in their command line."""
    return [pid for pid in descendants(os.getpid()) if words in command_line(pid)]


def _say(line: str) -> None:
    """Print a line of the report; Ray prints about killed nodes on stderr."""
    print(line, file=sys.__stdout__, flush=True)


def attack(fleet: Fleet, clients: Clients, seconds: float, every: float, source: random.Random) -> Counter[str]:
    """Kill at random moments, one in about `every` seconds, as many of each kind; return counts by kind.

    A node is killed if there is no target of a kind.
    """
    started, kills, deck = time.monotonic(), Counter[str](), list[str]()
    moment = started + source.uniform(0.5, 1.5) * every
    while moment < started + seconds:
        time.sleep(max(0.0, moment - time.monotonic()))
        moment = max(time.monotonic(), moment) + source.uniform(0.5, 1.5) * every
        deck = deck or source.sample(VICTIMS, len(VICTIMS))
        used = statuses(fleet.options.port) or []
        victim = deck.pop()
        if not fleet.kill(victim, source):
            victim = "node"
            fleet.kill(victim, source)
        kills[victim] += 1
        _say(
            f"{time.monotonic() - started:7.1f} s  kill {kills.total():3}: {victim:11} "
            f"({used.count('ok')} engines were in use); {clients.seen.right} right, "
            f"{len(clients.seen.wrong)} wrong, {len(clients.seen.failed)} failed so far",
        )
    return kills


def scale(fleet: Fleet, times: int, streams: int, expected: dict[Question, str], seed: int) -> list[Seen]:
    """Scale from zero to all engines by load and back, so often."""
    found = []
    fleet.deploy(min_replicas=0)
    fleet.until(lambda states: not states, "an idle fleet")
    for number in range(times):
        clients = Clients(fleet.options.port, streams, expected, seed + 1000 * number)
        try:
            up = fleet.until(lambda states: states.count("ok") == fleet.options.max_replicas, "all engines")
        finally:
            clients.stop()
        found.append(clients.seen)
        down = fleet.until(lambda states: not states, "an idle fleet")
        _say(f"scale {number + 1:3}: up in {up:.1f} s, down in {down:.1f} s, {clients.seen.right} right")
    return found


@contextlib.contextmanager
def made(count: int, port: int) -> Iterator[Fleet]:
    """Run a fleet with sockets, cache and token in a directory of their own.

    Processes get one thread each unless OMP_NUM_THREADS is set, since several share the processors.
    """
    with tempfile.TemporaryDirectory(prefix="ssf-") as folder:
        os.environ |= _PATIENT
        os.environ |= {"RAY_AUTH_TOKEN_PATH": f"{folder}/token", "SIDESTREAM_CACHE": f"{folder}/cache"}
        os.environ |= {"XDG_RUNTIME_DIR": folder, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        from ....runtime.fleet.cluster import secure

        secure()
        fleet = Fleet(count, port)
        try:
            yield fleet
        finally:
            fleet.close()


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a request failed or an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.dev.fleet.chaos", description=__doc__)
    parser.add_argument("--engines", type=int, default=3, metavar="N", help="one on each node (default: 3)")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M", help="of kills (default: 20)")
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="seconds between kills (default: 20)")
    parser.add_argument("--streams", type=int, default=24, metavar="N", help="at a time (default: 24)")
    parser.add_argument("--scales", type=int, default=10, metavar="N", help="times up and down (default: 10)")
    parser.add_argument("--port", type=int, default=8155, help="for HTTP (default: 8155)")
    parser.add_argument("--seed", type=int, default=0, help="of moments, victims and questions (default: 0)")
    options = parser.parse_args(arguments)
    _say(
        f"{options.engines} engines, {options.streams} streams, a kill about every {options.every:g} s for "
        f"{options.minutes:g} minutes, then {options.scales} times up and down; seed {options.seed}; "
        f"{os.cpu_count()} threads of {platform.processor() or platform.machine()}, Python {platform.python_version()}",
    )
    source = random.Random(options.seed)
    with contextlib.redirect_stdout(sys.stderr), made(options.engines, options.port) as fleet:
        fleet.deploy()
        up = fleet.until(lambda states: states.count("ok") == options.engines, "all engines")
        _say(f"all engines in use {up:.1f} s after the fleet was ready")
        asked = questions(source, QUESTIONS, "demo_model")
        expected = answers(options.port, asked, options.streams)
        clients = Clients(options.port, options.streams, expected, options.seed)
        try:
            kills = attack(fleet, clients, 60 * options.minutes, options.every, source)
        finally:
            clients.stop()
        back = fleet.until(lambda states: states.count("ok") == options.engines, "all engines")
        _say(f"all engines in use {back:.1f} s after the last answer; kills: {dict(kills)}")
        seen = [clients.seen, *scale(fleet, options.scales, options.streams, expected, options.seed)]
    pauses = sorted(clients.seen.pauses)
    wrong, failed = [line for each in seen for line in each.wrong], [line for each in seen for line in each.failed]
    _say(f"answers: {sum(each.right for each in seen)} right, {len(wrong)} wrong, {len(failed)} failed")
    if pauses:
        _say(
            f"longest pause within an answer under kills: p50 {pauses[len(pauses) // 2]:.2f} s, most {pauses[-1]:.2f} s"
        )
    for line in (wrong + failed)[:20]:
        _say(line)
    return int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main())
