"""Messages from rank 0 to its peers: settings at the start, and orders, which are everything except plans and masks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ....compiler.options import OptionError
from ...processes.threads import prepare_types
from ...quantization.defaults import AUTO, OFF
from ...scheduler.step_plan import PageCopies

ONE_PROCESS_OPTIONS = ("passes",)


class PeerSettings(Struct, frozen=True, kw_only=True):
    """Settings of a peer.

    device    rank 0's; the peers use the GPUs after it
    model     model directory, or config.json's fields
    llm       other keywords of `LLM`
    adapters  name -> directory
    """

    tp_rank: int
    tp_size: int
    device: str
    model: str | dict[str, Any]
    llm: dict[str, Any]
    adapters: dict[str, str]


prepare_types(PeerSettings)


class AddAdapter(Struct, frozen=True, tag="add"):
    """Add an adapter under rank 0's number, if it has rank 0's content hash."""

    name: str
    path: str
    replace: bool
    number: int
    content_hash: str


class StageUpdate(Struct, frozen=True, tag="stage"):
    """See `Model.stage_update`. The file's `path` can be opened as long as rank 0 waits."""

    name: str
    path: str
    version: int
    number: int
    content_hash: str


class EndUpdate(Struct, frozen=True, tag="end_update"):
    """Publish a staged update, or drop it."""

    number: int
    publish: bool


class AddSum(Struct, frozen=True, tag="add_sum"):
    """See `Model.add_sum`."""

    number: int
    parts: list[tuple[int, float]]


class RemoveAdapter(Struct, frozen=True, tag="remove"):
    """See `Model.remove_adapter`."""

    name: str


class RestrictAdapters(Struct, frozen=True, tag="restrict"):
    """See `Model.restrict_adapters`."""

    roots: list[str]


class StartLoad(Struct, frozen=True, tag="load"):
    """See `Runner.start_load`."""

    slot: int
    number: int


class CopyPages(Struct, frozen=True, tag="copy"):
    """See `Runner.copy_pages`."""

    copies: PageCopies


class ForgetAdapter(Struct, frozen=True, tag="forget"):
    """See `Runner.forget_adapter`."""

    number: int


class Sleep(Struct, frozen=True, tag="sleep"):
    """See `Sleeper.sleep`."""

    level: int


class WakeUp(Struct, frozen=True, tag="wake"):
    """See `Sleeper.wake_up`."""

    tags: list[str]


Order = (
    AddAdapter
    | StageUpdate
    | EndUpdate
    | AddSum
    | RemoveAdapter
    | RestrictAdapters
    | StartLoad
    | CopyPages
    | ForgetAdapter
    | Sleep
    | WakeUp
)
encode_order = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode


def as_builtins(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return `LLM`'s keywords as builtin types for a message. Raises OptionError for values that cannot be sent."""
    for name in ONE_PROCESS_OPTIONS:
        if keywords.get(name) is not None:
            raise OptionError(f"{name} is for a model in one process; leave it out, or use tensor_parallel_size=1")
    plain = {name: value for name, value in keywords.items() if value is not None and name != "device"}
    if plain.get("calibration", OFF) not in (AUTO, OFF):
        if not isinstance(plain["calibration"], (str, Path)):
            raise OptionError("with tensor_parallel_size give the calibration as the path of its file")
        plain["calibration"] = str(Path(plain["calibration"]).resolve())
    if plain.get("rounded_weights", OFF) != OFF:
        plain["rounded_weights"] = str(Path(plain["rounded_weights"]).resolve())
    if "kv_disk" in plain:
        plain["kv_disk"] = str(Path(plain["kv_disk"]).resolve())
    if "dtype" in plain:
        plain["dtype"] = str(plain["dtype"]).removeprefix("torch.")
    builtins: dict[str, Any] = msgspec.to_builtins({**plain, "show_progress": False})
    return builtins
