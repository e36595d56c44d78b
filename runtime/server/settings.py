"""Settings of `sidestream serve`, shared by its processes."""

import os
from typing import Any

from msgspec import Struct, field

from ..api.adapter_versions import AdapterVersion
from ..processes.threads import prepare_types
from ..processes.watchdog import SILENCE_SECONDS
from ..protocol.adapter_map import AdapterEntry
from ..scheduler.limits import KvRole

DRAIN_SECONDS = 30.0
MAX_WAITING = 4096
MAX_UPDATE_BYTES = 1 << 30


class ServeSettings(Struct, frozen=True, kw_only=True):
    """Settings of a server.

    model             model directory
    llm               further arguments of `LLM`
    adapters          name -> directory, anywhere on the machine
    loaded_adapters   changes by clients, which have priority; set by the supervisor for restarted processes
    updates           versions of adapters that clients have updated, the oldest of each first; set by the supervisor
                      for restarted processes
    saved_adapters    directory in which the supervisor saves them; "": they are lost when the server ends
    bind              address for clients
    keys              directory of CURVE keys
    drain_seconds     time for open requests after SIGTERM
    restart           restart processes that die or are killed
    step_timeout      seconds after which a step that has not returned gets the GPU process killed; None: see
                      `StepWatchdog`; 0: never kill a process for being late or silent
    silence_seconds   seconds without a heartbeat after which a process is killed
    admin             clients may load and unload adapters
    adapters_folder   directory whose folders are adapters; those in `adapters` are left out if they cannot be read
    adapter_roots     directories, and addresses for fsspec, from which clients may load adapters
    max_update_bytes  limit on an update of an adapter from a client's memory
    max_waiting       limit on waiting requests; above it new ones get `overloaded`
    served_model_name model name for clients
    chat_template     a Jinja template instead of the model's
    receipt_key       file with the key of receipts; "": there are none
    receipts          make a receipt for each request, not only where it is requested
    kv_role           "prefill" or "decode" for an engine of one kind; "": it does both
    kv_sources        name -> path of memory for KV pages: of the one that a prefill engine writes, or of all that a
                      decode engine reads
    gpu_command       command of the GPU process, without the channel's descriptor
    directory, generation   directory of the processes' sockets, and number of the GPU process's restarts; set by the
                            supervisor
    """

    model: str
    llm: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    loaded_adapters: list[AdapterEntry] = field(default_factory=list)
    updates: list[AdapterVersion] = field(default_factory=list)
    saved_adapters: str = ""
    bind: str = ""
    keys: str | None = None
    drain_seconds: float = DRAIN_SECONDS
    restart: bool = True
    step_timeout: float | None = None
    silence_seconds: float = SILENCE_SECONDS
    admin: bool = True
    adapters_folder: str = ""
    adapter_roots: list[str] = field(default_factory=list)
    max_update_bytes: int = MAX_UPDATE_BYTES
    max_waiting: int = MAX_WAITING
    served_model_name: str = ""
    chat_template: str | None = None
    receipt_key: str = ""
    receipts: bool = False
    kv_role: KvRole = ""
    kv_sources: dict[str, str] = field(default_factory=dict)
    gpu_command: list[str] = field(default_factory=list)
    directory: str = ""
    generation: int = 0

    def is_in_folder(self, path: str | None) -> bool:
        """Return whether an adapter's directory is in `adapters_folder`."""
        return path is not None and bool(self.adapters_folder) and os.path.dirname(path) == self.adapters_folder


prepare_types(ServeSettings)
