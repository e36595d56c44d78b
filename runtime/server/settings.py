"""What `sidestream serve` is told, as the three processes share it."""

from typing import Any

from msgspec import Struct, field

from ..processes.watch import SILENCE_SECONDS

DRAIN_SECONDS = 30.0
MAX_WAITING = 4096


class ServeSettings(Struct, frozen=True, kw_only=True):
    """Settings of a server.

    model             model directory
    llm               further arguments of `LLM`
    adapters          name -> directory; they may lie anywhere
    loaded_adapters   the same for those that clients have loaded: filled in by the supervisor, for processes that are
                      started again
    bind              the clients' address
    keys              directory of CURVE keys
    drain_seconds     how long open requests may go on after SIGTERM
    restart           start the processes again when one dies or is ended
    step_timeout      seconds after which a step that has not returned ends the GPU process; None: see
                      `watch.StepWatch`; 0: no process is ended for being late or silent
    silence_seconds   after so many seconds without a beat a process is ended
    admin             clients may load and unload adapters
    adapter_roots     directories under which a loaded adapter must lie
    max_waiting       requests that may wait to be admitted before newcomers are told `overloaded`
    served_model_name what clients are told
    chat_template     a Jinja template in place of the model's own
    gpu_command       command that runs the GPU process (its arguments: the channel's descriptor)
    directory, generation   where the processes' own sockets lie, and which life of the GPU process this is: filled in
                            by the supervisor
    """

    model: str
    llm: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    loaded_adapters: dict[str, str] = field(default_factory=dict)
    bind: str = ""
    keys: str | None = None
    drain_seconds: float = DRAIN_SECONDS
    restart: bool = True
    step_timeout: float | None = None
    silence_seconds: float = SILENCE_SECONDS
    admin: bool = True
    adapter_roots: list[str] = field(default_factory=list)
    max_waiting: int = MAX_WAITING
    served_model_name: str = ""
    chat_template: str | None = None
    gpu_command: list[str] = field(default_factory=list)
    directory: str = ""
    generation: int = 0
