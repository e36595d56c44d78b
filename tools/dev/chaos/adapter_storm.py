"""`python -m sidestream.tools.dev.chaos.adapter_storm`: replace adapters all the time behind two HTTP gateways.

Two servers of the demo model with few adapter slots, and two gateway processes that do not know of each other. Names
are replaced, unloaded and loaded over HTTP through either gateway, engines are killed, and clients ask, half of them
with streams. Each answer must be that of the acknowledged version or of an overlapping change.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....runtime.client.client import Client
from ....runtime.demo_model import DEMO_MODEL
from ....runtime.gateway.auth.usage_database import open_to_read
from ...bench.random_model import write_random_adapter
from .adapter_changes import Change, possible, prune
from .served import ServedDemo, tracebacks_in
from .served_gateway import ServedGateway, events, exchange, statuses

ENGINES, GATEWAYS, NAMES, VERSIONS, TOKENS = 2, 2, 6, 8, 8
PROMPT = "What is the capital of France?"
SERVER = ("supervisor", "batcher", "GPU process")
VICTIMS = (("batcher",), ("GPU process",), ("batcher", "GPU process"), SERVER)
UP_SECONDS = 300.0
REQUEST_SECONDS, CHANGE_SECONDS = 300.0, 900.0
PROGRESS_SECONDS = 30.0
CUT = "half an answer or none"
FINDINGS = ("wrong", "lost", "doubled", "HTTP 500", "traceback")
ARGUMENTS = ["--precision", "int8", "--max-loras", "3", "--max-cpu-loras", "4", "--max-lora-rank", "32"]
ARGUMENTS += ["--lora-target-modules", "all", "--max-model-len", "256", "--num-kv-pages", "64", "--max-num-seqs", "8"]
ARGUMENTS += ["--device", "cpu", "--speculation", "off"]


@dataclass
class Seen:
    """Outcomes of requests, changes and kills, and lines about what must not occur.

    wrong      an answer of no version, or of another one than the acknowledged or an overlapping one
    lost       half an answer or none, a refusal although a version was acknowledged, an answer without usage record
    doubled    an answer with more tokens than requested, or with a second usage record
    traceback  in the log of a process
    """

    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in FINDINGS})

    def summary(self) -> str:
        """Return the number of findings of each kind."""
        return ", ".join(f"{len(lines)} {kind}" for kind, lines in self.findings.items())


@dataclass(frozen=True)
class Reply:
    """Response to a completion. `problem`: "" for a whole answer, CUT, or status and code of the error."""

    text: str
    tokens: int = 0
    problem: str = ""


def complete(gateway: ServedGateway, name: str, request_id: str, stream: bool) -> Reply:
    """Ask for a completion of PROMPT."""
    body: dict[str, Any] = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    text, tokens = "", 0
    try:
        headers = {"X-Request-Id": request_id}
        with exchange(gateway.port, "POST", "/v1/completions", body, REQUEST_SECONDS, headers) as response:
            if not stream or response.status != http.client.OK:
                answer = json.loads(response.read())
                if "error" in answer:
                    return Reply("", 0, f"{response.status} {answer['error'].get('code')}")
                return Reply(answer["choices"][0]["text"], answer["usage"]["completion_tokens"])
            for event in events(response):
                if "error" in event:
                    return Reply(text, tokens, f"in a stream: {event['error'].get('code')}")
                text += "".join(choice["text"] for choice in event["choices"])
                tokens += (event["usage"] or {}).get("completion_tokens", 0)
    except (OSError, http.client.HTTPException, ValueError) as problem:
        return Reply(text, tokens, f"{CUT}: {problem!r}")
    return Reply(text, tokens)


class Storm:
    """Runs threads of writers, askers and a killer for some minutes. `contents`: version -> content hash."""

    def __init__(self, gateways: list[ServedGateway], engines: list[ServedDemo], folders: list[Path]) -> None:
        self.gateways, self.engines, self.folders = gateways, engines, folders
        self.changes: dict[str, list[Change]] = {f"q{number}": [] for number in range(NAMES)}
        self.contents: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        """Answer -> content hash."""
        self.seen = Seen()
        self._answered: dict[str, str] = {}  # request id -> content hash
        self._open: dict[str, float] = {}  # request id -> start
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def measure(self) -> None:
        """Load each version under a name of its own, and record its answer."""
        first = self.gateways[0]
        for folder in self.folders:
            status, answer = first.call("POST", "/v1/load_lora_adapter", _load(folder.name, folder), CHANGE_SECONDS)
            if status != http.client.OK:
                raise RuntimeError(f"{folder}: status {status}: {answer}")
            reply = complete(first, folder.name, f"measure-{folder.name}", False)
            content = first.call("GET", f"/v1/models/{folder.name}")[1]["content"]
            if reply.problem or self.versions.setdefault(reply.text, content) != content:
                raise RuntimeError(f"{folder}: {reply} is no answer of its own")
            self.contents[folder.name] = content
        print(f"{len(self.versions)} versions with different answers", flush=True)

    def change(self, source: random.Random) -> None:
        """Make one change."""
        name, folder = source.choice(list(self.changes)), source.choice(self.folders)
        gateway, kind = source.choice(self.gateways), "unload" if source.random() < 0.15 else "load"
        change = Change(None if kind == "unload" else self.contents[folder.name], time.monotonic())
        with self._lock:
            prune(self.changes[name], min(self._open.values(), default=change.started))
            self.changes[name].append(change)
        body = {"lora_name": name} if kind == "unload" else _load(name, folder)
        try:
            status, answer = gateway.call("POST", f"/v1/{kind}_lora_adapter", body, CHANGE_SECONDS)
        except (OSError, http.client.HTTPException, ValueError) as problem:
            self._find("lost", f"{kind} of {name}: {problem!r}")
            return
        with self._lock:
            change.ended = time.monotonic()
            change.acknowledged = change.ended if status == http.client.OK else change.acknowledged
            code = "acknowledged" if status == http.client.OK else f"{status} {answer['error'].get('code')}"
            self.seen.counts[f"{kind}: {code}"] += 1
        if status == http.client.INTERNAL_SERVER_ERROR:
            self._find("HTTP 500", f"{kind} of {name}: {answer}")
        time.sleep(source.choice((0.0, 0.0, 0.3)) if status == http.client.OK else 0.2)

    def ask(self, source: random.Random) -> None:
        """Send one request and judge its answer."""
        name, place, started = source.choice(list(self.changes)), source.randrange(GATEWAYS), time.monotonic()
        request_id = f"g{place}-{next(self._numbers)}"
        with self._lock:
            self._open[request_id] = started
        reply = complete(self.gateways[place], name, request_id, source.random() < 0.5)
        with self._lock:
            allowed = possible(self.changes[name], started, time.monotonic())
            del self._open[request_id]
        self.judge(name, request_id, reply, allowed, time.monotonic() - started)
        if reply.problem:
            time.sleep(0.05)

    def judge(self, name: str, request_id: str, reply: Reply, allowed: set[str | None], seconds: float) -> None:
        """Count a reply; `allowed` are the versions that may answer, None for a refusal."""
        about = f"{name} ({request_id}, {seconds:.2f} s): {reply}, allowed {[str(each)[:8] for each in allowed]}"
        if reply.problem:
            self._count(f"request: {reply.problem}")
            if reply.problem.startswith("500 "):
                self._find("HTTP 500", about)
            is_unloaded = "model_not_found" in reply.problem and None in allowed
            # ends a stream whose version no engine has any more
            is_replaced = "adapter_changed" in reply.problem and len(allowed) > 1
            if not is_unloaded and not is_replaced:
                self._find("lost", about)
            return
        self._count("request: answered" + (" during a change" if len(allowed) > 1 else ""))
        content = self.versions.get(reply.text)
        if reply.tokens != TOKENS:
            self._find("doubled" if reply.tokens > TOKENS else "lost", about)
        if content is None or content not in allowed:
            self._find("wrong", f"{about}: version {str(content)[:8]}")
        else:
            self._answered[request_id] = content

    def kill(self, source: random.Random, every: float) -> None:
        """Kill processes of one engine if both gateways use all engines."""
        if self._over.wait(every) or any((statuses(each.port) or []).count("ok") < ENGINES for each in self.gateways):
            return
        engine, roles = source.choice(self.engines), source.choice(VICTIMS)
        processes = engine.processes()
        for role in roles:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(processes[role], signal.SIGKILL)
        self._count(f"kill: {' and '.join(roles)}")
        if roles == SERVER:
            engine.restart()

    def run(self, seconds: float, kill_every: float, writers: int, askers: int, seed: int) -> None:
        """Run the storm, print its progress, and wait until all engines serve the same adapters."""
        self.measure()
        sources = [random.Random(f"{seed} {place}") for place in range(writers + askers + 1)]
        work: list[Callable[[random.Random], None]] = []
        work.extend([self.change] * writers)
        work.extend([self.ask] * askers)
        if kill_every:
            work.append(lambda source: self.kill(source, kill_every))
        threads = [threading.Thread(target=self._repeat, args=pair) for pair in zip(work, sources, strict=False)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            while (left := started + seconds - time.monotonic()) > 0:
                time.sleep(min(left, PROGRESS_SECONDS))
                self._print_progress(time.monotonic() - started)
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        for gateway in self.gateways:
            gateway.wait(ENGINES, UP_SECONDS)
        end = time.monotonic() + UP_SECONDS
        while (differing := self._differing()) and time.monotonic() < end:
            time.sleep(0.5)
        self.seen.findings["wrong"] += differing

    def _repeat(self, work: Callable[[random.Random], None], source: random.Random) -> None:
        while not self._over.is_set():
            try:
                work(source)
            except Exception as problem:  # a fault of this program must not look like a calm storm
                self._find("lost", f"a thread of the storm ended: {problem!r}")
                raise

    def _print_progress(self, seconds: float) -> None:
        with self._lock:
            totals = Counter[str]()
            for name, count in self.seen.counts.items():
                kind, _, outcome = name.partition(": ")
                totals[outcome.partition(" ")[0] if kind == "request" else f"{kind}s"] += count
            said = f"{totals['answered']} answered, {totals['loads']} loads, {totals['unloads']} unloads, "
            print(f"{seconds:6.0f} s  {said}{totals['kills']} kills; {self.seen.summary()}", flush=True)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.seen.counts[outcome] += 1

    def _find(self, kind: str, line: str) -> None:
        with self._lock:
            self.seen.findings[kind].append(line)

    def _differing(self) -> list[str]:
        """Return the names whose versions differ between engines, or from what the changes allow at the end."""
        held = []
        for engine in self.engines:
            with Client(engine.address) as client:
                held.append({info.name: info.content for info in client.list_adapters()})
        found = []
        for name, changes in self.changes.items():
            versions = {each.get(name) for each in held}
            if len(versions) > 1 or not versions <= possible(changes, time.monotonic(), time.monotonic()):
                found.append(f"{name}: engines ended with {versions}")
        return found

    def check_usage_logs(self) -> None:
        """Compare the answers with the usage records of the gateways, which have ended."""
        records: dict[str, list[str]] = {}
        for gateway in self.gateways:
            with contextlib.closing(open_to_read(gateway.usage_log)) as log:
                for request_id, content in log.execute("SELECT request_id, adapter_content FROM usage"):
                    records.setdefault(request_id, []).append(content)
        for request_id, content in self._answered.items():
            found = records.get(request_id, [])
            if found != [content]:
                kind = "wrong" if len(found) == 1 else "doubled" if found else "lost"
                self._find(kind, f"{request_id}: answered by {content[:8]}, usage records of {found}")


def _load(name: str, folder: Path) -> dict[str, Any]:
    return {"lora_name": name, "lora_path": str(folder), "load_inplace": True}


def write_versions(folder: Path) -> list[Path]:
    """Write VERSIONS adapters whose answers differ from each other and from the base model's."""
    config = json.loads((Path(DEMO_MODEL) / "config.json").read_text(encoding="utf-8"))
    folders = [folder / f"v{number}" for number in range(VERSIONS)]
    for number, each in enumerate(folders):
        write_random_adapter(each, config, 4, 1000 + number)
        path = each / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"lora_alpha": 64}))
    return folders


def main(arguments: list[str] | None = None) -> int:
    """Return 1 with findings."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.dev.chaos.adapter_storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N", help="length of the storm (default: 5)")
    parser.add_argument("--kill-every", type=float, default=30.0, metavar="S", help="0: never (default: 30 s)")
    parser.add_argument("--writers", type=int, default=3, metavar="N", help="changes at a time (default: 3)")
    parser.add_argument("--askers", type=int, default=6, metavar="N", help="requests at a time (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="of names, versions and victims (default: 0)")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sss-")))
        folders = write_versions(folder / "adapters")
        roots = ["--adapter-root", str(folder / "adapters")]
        # one server has its adapters again after a kill of all its processes, the other one gets them from gateways
        saves = ("--save-adapters", "--no-save-adapters")
        engines = [
            stack.enter_context(ServedDemo(folder / f"e{number}", *roots, saves[number], *ARGUMENTS))
            for number in range(ENGINES)
        ]
        for engine in engines:
            engine.wait(UP_SECONDS)
        addresses = [engine.address for engine in engines]
        gateways = [stack.enter_context(ServedGateway(folder / f"g{number}", addresses)) for number in range(GATEWAYS)]
        for gateway in gateways:
            gateway.wait(ENGINES, UP_SECONDS)
        storm = Storm(gateways, engines, folders)
        storm.run(options.minutes * 60, options.kill_every, options.writers, options.askers, options.seed)
        for gateway in gateways:
            gateway.stop()
        storm.check_usage_logs()
        for log in [*(engine.log for engine in engines), *(gateway.log for gateway in gateways)]:
            storm.seen.findings["traceback"] += tracebacks_in(log)
    seen = storm.seen
    print(f"{options.minutes:g} minutes, seed {options.seed}: {seen.summary()}")
    for kind, count in sorted(seen.counts.items()):
        print(f"{count:8} {kind}")
    for kind, lines in seen.findings.items():
        for line in lines[:20]:
            print(f"{kind}: {line}")
    return int(any(seen.findings.values()))


if __name__ == "__main__":
    sys.exit(main())
