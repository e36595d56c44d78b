"""What rank 0 tells the other ranks: settings at the start, and what is not a plan afterwards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ....compiler.options import OptionError
from ...quantization.file_names import AUTO, OFF

LOCAL = ("passes",)  # options of what only one process can do


class PeerSettings(Struct, frozen=True, kw_only=True):
    """Settings of a peer.

    rank, world       its place among the ranks
    device            rank 0's; the others' GPUs are those after it
    model             model directory, or config.json's fields
    llm               further arguments of `LLM`
    adapters          name -> directory
    """

    rank: int
    world: int
    device: str
    model: str | dict[str, Any]
    llm: dict[str, Any]
    adapters: dict[str, str]


class AddAdapter(Struct, frozen=True, tag="add"):
    """Read an adapter and give it the number that rank 0 has given it; its content must be what rank 0 has read."""

    name: str
    path: str
    replace: bool
    number: int
    content: str


class RemoveAdapter(Struct, frozen=True, tag="remove"):
    """Forget an adapter's name."""

    name: str


class RestrictAdapters(Struct, frozen=True, tag="restrict"):
    """From now on adapters must lie under these directories."""

    roots: list[str]


class StartLoad(Struct, frozen=True, tag="load"):
    """Bring an adapter into a slot."""

    slot: int
    number: int


class ForgetAdapter(Struct, frozen=True, tag="forget"):
    """Nothing uses an adapter's number any more."""

    number: int


class Sleep(Struct, frozen=True, tag="sleep"):
    """Give the device's memory back."""

    level: int


class WakeUp(Struct, frozen=True, tag="wake"):
    """Take memory again for what the tags name."""

    tags: list[str]


Order = AddAdapter | RemoveAdapter | RestrictAdapters | StartLoad | ForgetAdapter | Sleep | WakeUp
encode_order = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode


def portable(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """`LLM`'s keywords as another process can be given them.

    Raises OptionError for what stays in this process.
    """
    for name in LOCAL:
        if keywords.get(name) is not None:
            raise OptionError(f"{name} is for a model in one process; leave it out, or use tensor_parallel_size=1")
    plain = {name: value for name, value in keywords.items() if value is not None and name != "device"}
    if plain.get("calibration", OFF) not in (AUTO, OFF):
        if not isinstance(plain["calibration"], (str, Path)):
            raise OptionError("with tensor_parallel_size give the calibration as the path of its file")
        plain["calibration"] = str(Path(plain["calibration"]).resolve())
    if plain.get("rounded_weights", OFF) != OFF:
        plain["rounded_weights"] = str(Path(plain["rounded_weights"]).resolve())
    if "dtype" in plain:
        plain["dtype"] = str(plain["dtype"]).removeprefix("torch.")
    builtins: dict[str, Any] = msgspec.to_builtins({**plain, "show_progress": False})
    return builtins
