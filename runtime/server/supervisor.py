"""The supervisor of an engine: starts, watches, restarts and stops the batcher, the GPU process and the HTTP gateway.

    Supervisor(ServeSettings(model="path", bind="ipc:///run/user/1000/sidestream/engine.sock")).run()

Each child has a channel that closes when either process ends, and ends with it. So no process outlives `kill -9` of
another one.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from ..api.adapter_versions import AdapterVersion
from ..processes.channel import ChannelClosed
from ..processes.child import STOP_SECONDS, Child, status_text
from ..processes.watchdog import POLL_SECONDS, STOPPED_POLL_SECONDS, StoppedProcesses
from ..protocol.adapter_map import AdapterEntry, AdapterMap
from ..protocol.addresses import AddressLock, check_keys, make_private_directory, parse, temporary_root
from .gpu_link import Ready
from .saved_adapters import SavedAdapters
from .settings import ServeSettings
from .supervisor_loop import EXIT_DEAD, EXIT_SETTINGS, GatewayProcess, SupervisorLoop

MAX_DEATHS = 5
"""Number of deaths in a row, without a finished request between them, after which processes are not restarted."""


class Supervisor(SupervisorLoop):
    """`run` serves until SIGTERM or SIGINT (exit code 0), a failed start (2), or a death without a restart (1).

    Raises AddressError or KeyFileError for an address that may not be used.
    """

    def __init__(
        self, settings: ServeSettings, print_line: Callable[[str], None] = print, gateway: GatewayProcess | None = None
    ) -> None:
        self._address = parse(settings.bind)
        check_keys(self._address, settings.keys is not None)
        make_private_directory(self._address)
        self._lock = AddressLock(self._address)
        root = os.environ.get("XDG_RUNTIME_DIR") or temporary_root()
        self._directory = Path(tempfile.mkdtemp(prefix="sidestream-", dir=root))
        self._saved = SavedAdapters(settings)
        settings = structs.replace(
            settings, directory=str(self._directory), generation=0, loaded_adapters=self._saved.read()
        )
        super().__init__(settings, print_line, gateway)
        self._batcher: Child | None = None
        self._gpu: Child | None = None
        self._stopped = StoppedProcesses()
        self._is_parallel = settings.llm.get("tensor_parallel_size", 1) > 1
        self._deaths = 0
        self._was_ready = False
        self._drain_deadline = 0.0
        self._gpu_started = 0.0

    def _start(self) -> None:
        self._batcher = self._start_batcher()
        self._gpu = self._start_gpu()

    def _stop(self) -> None:
        self._saved.write(self._settings.loaded_adapters)
        children = [child for child in (self._gpu, self._batcher) if child is not None]
        self._order({"order": "end"})
        for child in children:
            child.channel.close()
        if self._gateway is not None:
            self._gateway.close()
        for child in children:
            child.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._address.path is not None:
            self._address.path.unlink(missing_ok=True)
        self._lock.release()

    def _start_batcher(self) -> Child:
        command = [sys.executable, "-m", "sidestream.runtime.server.batcher"]
        return Child.start("batcher", command, self._settings, self._clock.seconds)

    def _start_gpu(self) -> Child:
        command = self._settings.gpu_command or [sys.executable, "-m", "sidestream.runtime.server.gpu_process"]
        self._gpu_started = self._clock.seconds
        return Child.start("GPU process", command, self._settings, self._gpu_started)

    def _engines(self) -> list[Child]:
        return [child for child in (self._batcher, self._gpu) if child is not None]

    def _with_heartbeat(self) -> list[Child]:
        return self._children()

    def _timeout(self) -> float:
        timeout = STOPPED_POLL_SECONDS if self._is_parallel else POLL_SECONDS
        return min(timeout, max(0.0, self._drain_deadline - time.monotonic())) if self._draining else timeout

    def _on_turn_end(self) -> int | None:
        self._kill_stopped()
        self._saved.write(self._settings.loaded_adapters)
        return 0 if self._draining and time.monotonic() >= self._drain_deadline else None

    def _kill_stopped(self) -> None:
        """Kill a GPU process that is stopped while other tensor-parallel processes wait for it inside their kernels."""
        if self._gpu is None or not self._is_parallel or self._settings.step_timeout == 0:
            return
        if self._stopped.find([self._gpu.process.pid]):
            self._print_line(
                "the GPU process is stopped by a signal (SIGSTOP), and other ranks wait for it; killing it"
            )
            self._gpu.process.kill()

    def _on_signals(self, count: int) -> int | None:
        # the second signal, or no engine to drain
        if self._draining or self._batcher is None or not self._was_ready:
            return 0
        seconds = self._settings.drain_seconds
        self._print_line(f"draining for up to {seconds:g} s; a second signal stops at once")
        self._draining, self._drain_deadline = True, time.monotonic() + seconds + STOP_SECONDS
        if self._gateway is not None:
            self._gateway.send_draining()  # first: an idle batcher ends at once
        self._order({"order": "drain", "seconds": seconds})
        return None

    def _on_message(self, child: Child, message: dict[str, Any]) -> int | None:
        event = message["event"]
        if event == "failed":
            self._print_line(f"error: {message['message']}")
            if not (self._was_ready and self._settings.restart):
                return EXIT_SETTINGS
            # a restart failed: its end counts as a death
        elif event == "ready":
            child.started = True
            self._keep_adapter_limits(msgspec.convert(message["ready"], Ready))
        elif event == "adapter":
            self._keep_adapter(msgspec.convert(message["entry"], AdapterEntry))
        elif event == "updated":
            entry = message["entry"]
            if entry is not None:
                self._keep_adapter(msgspec.convert(entry, AdapterEntry))
            updates = msgspec.convert(message["updates"], list[AdapterVersion])
            self._settings = structs.replace(self._settings, updates=updates)
        elif event == "gpu_awaited":  # after the changes of adapters that the former process made
            self._print_line("starting the GPU process again")
            self._gpu = self._start_gpu()
        elif event == "serving":
            self._was_ready = True
            self._print_line(f"serving at {self._settings.bind}")
        elif event == "answered":
            self._deaths = 0
        elif event == "overdue":
            self._kill_overdue(message)
        elif event == "bound":
            child.started = True
            self.addresses = [message["address"]]
            self._settings = structs.replace(self._settings, bind=message["address"])
            if self._gateway is not None and self._gateway.child is None:
                self._gateway.start(self.addresses, self._clock.seconds)
        elif event == "drained":
            return 0 if self._draining else EXIT_DEAD
        return None

    def _keep_adapter_limits(self, ready: Ready) -> None:
        """Give restarted GPU processes the same adapter slots and ranks."""
        self._print_line(capacity_line(ready, self._clock.seconds - self._gpu_started))
        limits = {
            "max_loras": ready.num_slots,
            "max_lora_rank": ready.lora_rank,
            "max_expert_rank": ready.expert_rank or None,
            "lora_target_modules": ready.lora_targets,
            "lora_parts": ready.lora_parts,
        }
        if ready.lora_rank:
            given = {name: value for name, value in self._settings.llm.items() if value is not None}
            self._settings = structs.replace(self._settings, llm=limits | given)

    def _keep_adapter(self, entry: AdapterEntry) -> None:
        """Give a change by a client to restarted processes; it is saved at the end of the turn."""
        changes = AdapterMap(self._settings.loaded_adapters)
        changes.merge(entry)
        given = {name: path for name, path in self._settings.adapters.items() if name != entry.name}
        self._settings = structs.replace(
            self._settings,
            adapters=given,
            loaded_adapters=list(changes.entries.values()),
            updates=[each for each in self._settings.updates if each.name != entry.name],
        )

    def _kill_overdue(self, message: dict[str, Any]) -> None:
        """Kill the GPU process after the batcher reported an overdue step, unless the process has been replaced."""
        if self._gpu is not None and message["generation"] == self._settings.generation:
            self._print_line(f"a step did not return within {message['seconds']:g} s; killing the GPU process")
            self._gpu.process.kill()

    def _on_death(self, child: Child, status: int) -> int | None:
        if self._draining and child is self._batcher:
            return 0
        self._print_line(f"the {child.name} died ({status_text(status)})")
        self._deaths += 1
        restarting = self._settings.restart and self._was_ready and self._deaths < MAX_DEATHS and not self._draining
        if child is self._gpu:
            self._gpu = None
            self._order({"order": "gpu_died", "restarting": restarting})
            if not restarting:
                return self._wait_for_batcher()
            self._next_generation()
            self._order({"order": "gpu_starting", "generation": self._settings.generation})
            return None
        self._batcher = None
        if self._gpu is not None:
            self._gpu.stop()
            self._gpu = None
        if not restarting:
            return EXIT_DEAD
        self._next_generation()
        self._print_line("starting both processes again")
        self._start()
        return None

    def _next_generation(self) -> None:
        self._settings = structs.replace(self._settings, generation=self._settings.generation + 1)

    def _wait_for_batcher(self) -> int:
        """Wait until the batcher has sent its clients an error; the GPU process is not restarted."""
        if self._batcher is not None:
            try:
                self._batcher.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._print_line("the batcher did not end by itself")
        return EXIT_DEAD

    def _order(self, order: dict[str, Any]) -> None:
        if self._batcher is not None:
            try:
                self._batcher.channel.send(order)
            except ChannelClosed:
                return  # the loop handles its death


def capacity_line(ready: Ready, seconds: float) -> str:
    """Return a line with what the engine can hold, and the seconds that its start took."""
    return (
        f"ready in {seconds:.1f} s on {ready.device}: {ready.num_pages * ready.page_size} KV tokens "
        f"({ready.num_pages} pages), "
        f"{len(ready.adapters)} adapters ({ready.num_slots} at once), up to {ready.max_num_seqs} requests at once, "
        f"{ready.max_model_len} tokens each, "
        f"{ready.max_num_batched_tokens} tokens a step"
    )
