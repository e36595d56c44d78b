"""A change of an adapter that was acknowledged is known to the next GPU process, and saved."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from sidestream.runtime.protocol.adapter_map import AdapterEntry, Stamp
from sidestream.runtime.server.batcher import Batcher
from sidestream.runtime.server.saved_adapters import SavedAdapters
from sidestream.runtime.server.settings import ServeSettings
from sidestream.runtime.server.supervisor import Supervisor


class Process:
    """A child without a process. Records the messages to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[dict[str, Any]] = []
        self.channel = SimpleNamespace(send=self.messages.append, close=lambda: None)

    def stop(self) -> int:
        return 0


class Processes(Supervisor):
    """A supervisor of such children."""

    def __init__(self, settings: ServeSettings) -> None:
        super().__init__(settings, lambda line: None)
        self.given: list[list[AdapterEntry]] = []
        self._start()
        self._was_ready = True

    def _start_batcher(self) -> Any:
        return Process("batcher")

    def _start_gpu(self) -> Any:
        self.given.append(self._settings.loaded_adapters)
        return Process("GPU process")

    def receive(self, *events: dict[str, Any]) -> None:
        for event in events:
            assert self._batcher is not None
            self._on_message(self._batcher, event)


def test_a_change_that_arrives_after_the_death_reaches_the_next_gpu_process_and_the_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    settings = ServeSettings(model="/m", bind=f"ipc://{tmp_path}/e.sock", saved_adapters=str(tmp_path / "state"))
    supervisor = Processes(settings)
    try:
        batcher: Any = supervisor._batcher
        assert supervisor._gpu is not None and supervisor._on_death(supervisor._gpu, -9) is None
        # the batcher reads the last reply of the former process, and only then the supervisor's orders
        entry = AdapterEntry("x", Stamp(5, 0, "engine"), "/v2", "two")
        supervisor.receive({"event": "adapter", "entry": msgspec.to_builtins(entry)})
        events: list[dict[str, Any]] = []
        executed: Any = SimpleNamespace(
            _gpu_died=lambda restarting: None,
            _open_link=lambda generation: None,
            _state=SimpleNamespace(dead=False),
            _channel=SimpleNamespace(send=events.append),
        )
        for order in batcher.messages:
            Batcher._execute(executed, order)
        supervisor.receive(*events)
        assert supervisor.given == [[], [entry]]
        assert supervisor._gpu is not None
    finally:
        supervisor._stop()
    assert SavedAdapters(settings).read() == [entry], "also without a further turn of the loop"
