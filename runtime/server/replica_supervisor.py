"""Several engines of one model on one host, each with its own supervisor, batcher and GPU process.

An engine that ends is restarted alone; the others and the HTTP gateway continue.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import structs

from ..processes.child import Child, status_text
from ..protocol.addresses import parse
from .settings import ServeSettings
from .supervisor_loop import EXIT_DEAD, EXIT_SETTINGS, GatewayProcess, SupervisorLoop
from .transfer.page_memory import DEFAULT_GB, PageMemory

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 60.0
"""Time before an ended engine is restarted; doubles with each short life."""
LIFE_SECONDS = 60.0
"""An engine that lived longer did not die at its start."""
GPUS = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def addresses_of(bind: str, count: int) -> list[str]:
    """Return the addresses of `count` engines: `NAME-0.sock`, `NAME-1.sock` ... for `ipc://.../NAME.sock`, consecutive
    ports from the one of `tcp://host:port`. Raises ValueError if there are too few ports.
    """
    address = parse(bind)
    if address.path is not None:
        path = address.path
        return [f"ipc://{path.with_name(f'{path.stem}-{index}{path.suffix}')}" for index in range(count)]
    if not 0 < address.port <= 65536 - count:
        raise ValueError(f"--bind {bind} needs a port from 1 to {65536 - count}: {count} engines take as many in a row")
    return [str(replace(address, port=address.port + index)) for index in range(count)]


def devices_of(
    count: int, device: str | None, environment: Mapping[str, str] = os.environ, ranks: int = 1
) -> list[dict[str, str]]:
    """Return environment variables for each of `count` engines: `ranks` GPUs of its own, or nothing on a CPU.

    Engines run on a CPU, too, if `device` is None and the environment hides all GPUs, with "" or "-1". Raises
    ValueError if the host has too few GPUs.
    """
    found = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    named = environment.get(VISIBLE)
    visible = [str(index) for index in range(found)]
    if named is not None:  # CUDA ignores what follows "-1"
        visible = [each for each in takewhile(lambda each: each.strip() != "-1", named.split(",")) if each.strip()]
    if device == "cpu" or not found or (device is None and not visible):
        return [{} for _ in range(count)]
    if len(visible) < count * ranks:
        each = "" if ranks == 1 else f" of {ranks} ranks each"
        raise ValueError(
            f"{count} engines{each} need {count * ranks} GPUs, and there are {len(visible)}; lower --data-parallel-size"
            + ("" if named is None else f" or name more in {VISIBLE}")
        )
    return [{VISIBLE: ",".join(visible[ranks * index : ranks * (index + 1)])} for index in range(count)]


class _Replica:
    """One engine, and its restarts."""

    def __init__(self, settings: ServeSettings, environment: dict[str, str], name: str) -> None:
        self.settings, self.environment, self.name = settings, environment, name
        self.child: Child | None = None
        self.started = 0.0
        self.served = False
        self.deaths = 0
        self.restart_at: float | None = None

    def start(self, now: float) -> None:
        command = [sys.executable, "-m", "sidestream.runtime.server.replica_process"]
        self.child = Child.start(self.name, command, self.settings, now, environment=self.environment)
        self.started, self.restart_at = now, None

    def schedule_restart(self, now: float) -> None:
        """Back off exponentially while it lives only shortly."""
        self.deaths = 1 if now - self.started > LIFE_SECONDS else self.deaths + 1
        self.restart_at = now + min(MAX_BACKOFF_SECONDS, MIN_BACKOFF_SECONDS * 2.0 ** (self.deaths - 1))


class ReplicaSupervisor(SupervisorLoop):
    """`run` serves with `count` engines until SIGTERM or SIGINT (exit code 0), a failed start (2), or until all engines
    have ended without a restart (1). The first `prefill_engines` of them only compute prompts.

    Raises ValueError if the host has too few GPUs or ports.
    """

    def __init__(
        self,
        settings: ServeSettings,
        count: int,
        print_line: Callable[[str], None] = print,
        gateway: GatewayProcess | None = None,
        prefill_engines: int = 0,
    ) -> None:
        super().__init__(settings, print_line, gateway)
        self._memory: PageMemory | None = None
        if prefill_engines:
            self._memory = PageMemory(prefill_engines, settings.llm.get("kv_host_gb", DEFAULT_GB))
        self.addresses = addresses_of(settings.bind, count)
        devices = devices_of(count, settings.llm.get("device"), ranks=settings.llm.get("tensor_parallel_size", 1))
        self._replicas = [
            self._replica(structs.replace(settings, bind=address), environment, index)
            for index, (address, environment) in enumerate(zip(self.addresses, devices, strict=True))
        ]

    def _replica(self, settings: ServeSettings, environment: dict[str, str], index: int) -> _Replica:
        if self._memory is None:
            return _Replica(settings, environment, f"engine {index}")
        settings = self._memory.settings_of(settings, index)
        return _Replica(settings, environment, f"{settings.kv_role} engine {index}")

    def _start(self) -> None:
        for replica in self._replicas:
            replica.start(self._clock.seconds)
        if self._gateway is not None:
            self._gateway.start(self.addresses, self._clock.seconds)

    def _stop(self) -> None:
        if self._gateway is not None:
            self._gateway.close()
        children = self._engines()
        for child in children:
            child.channel.close()
        for child in children:
            child.stop()
        if self._memory is not None:
            self._memory.close()

    def _engines(self) -> list[Child]:
        return [replica.child for replica in self._replicas if replica.child is not None]

    def _on_turn_end(self) -> int | None:
        """Restart engines that are due. Ends when none runs or will be restarted."""
        for replica in self._replicas:
            if replica.restart_at is not None and self._clock.seconds >= replica.restart_at and not self._draining:
                self._print_line(f"starting {replica.name} again")
                replica.start(self._clock.seconds)
        waiting = not self._draining and any(replica.restart_at is not None for replica in self._replicas)
        if not waiting and not self._engines():
            return 0 if self._draining else EXIT_DEAD
        return None

    def _on_signals(self, count: int) -> int | None:
        """Let each engine finish its requests; it stops at once at the second signal."""
        self._draining = True
        for _ in range(count):
            if self._gateway is not None:
                self._gateway.send_draining()
            for child in self._engines():
                child.process.send_signal(signal.SIGTERM)
        return None

    def _on_message(self, child: Child, message: dict[str, Any]) -> int | None:
        self._print_line(f"{child.name}: {message['line']}")
        if message["line"].startswith("serving at"):
            self._replica_of(child).served = True
        return None

    def _replica_of(self, child: Child) -> _Replica:
        return next(replica for replica in self._replicas if replica.child is child)

    def _on_death(self, child: Child, status: int) -> int | None:
        replica = self._replica_of(child)
        replica.child = None
        if self._draining:
            return None
        if status == EXIT_SETTINGS and not replica.served:
            return EXIT_SETTINGS
        self._print_line(f"{child.name} ended ({status_text(status)})")
        if self._settings.restart:
            replica.schedule_restart(self._clock.seconds)
        return None
