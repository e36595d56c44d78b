"""Options of commands that talk to a server."""

import argparse
from typing import TYPE_CHECKING, Any

from .engine import add_value, number

if TYPE_CHECKING:
    from ...runtime.api.sampling_params import SamplingParams
    from ...runtime.client.client import Client


seconds = number("seconds", 0, 86400, " seconds", above=True)


def add_connection_options(parser: argparse.ArgumentParser, flag: str = "--address", optional: bool = False) -> None:
    """Add the server's address and how to connect.

    `optional`: the flag alone means the default address, and without the flag `address` is None.
    """
    group = parser.add_argument_group("server")
    where = "ipc:///path or tcp://host:port (default: $SIDESTREAM_ADDRESS, or the default of `sidestream serve`)"
    if optional:
        group.add_argument(
            flag, dest="address", nargs="?", const="", metavar="ADDRESS", help=f"a running server answers; {where}"
        )
    else:
        group.add_argument(flag, dest="address", metavar="ADDRESS", help=where)
    group.add_argument(
        "--keys", metavar="DIR", help="this client's folder of `sidestream keys curve`; needed beyond this machine"
    )
    add_value(group, "--connect-timeout", 10.0, "seconds to wait for a server", seconds, "S")


def add_sampling_options(
    parser: argparse.ArgumentParser, temperature: float, max_tokens: int, seed: bool = True
) -> Any:
    """Add the sampling parameters, and return their group."""
    group = parser.add_argument_group("sampling")
    add_value(group, "--max-tokens", max_tokens, "longest answer")
    group.add_argument(
        "--temperature", type=float, default=temperature, help="0: the most likely token (default: %(default)s)"
    )
    group.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="0: off (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--stop", action="append", default=None, metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    if seed:
        group.add_argument("--seed", type=int, help="make random sampling repeatable")
    return group


def sampling_params(options: argparse.Namespace, **more: Any) -> "SamplingParams":
    """Return the sampling parameters. Raises RequestError."""
    from ...runtime.api.sampling_params import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed")
    return SamplingParams(**({name: getattr(options, name) for name in names} | more))


def connect(options: argparse.Namespace) -> "Client":
    """Return a connected client. Raises EngineDeadError if no server answers."""
    from ...runtime.client.client import Client

    client = Client(options.address or None, keys=options.keys, connect_timeout=options.connect_timeout)
    try:
        client.connect()
    except BaseException:
        client.close()
        raise
    return client


def printable(text: str) -> str:
    """Return a model's text for a terminal: control characters other than line ends and tabs become spaces."""
    return "".join(character if character.isprintable() or character in "\n\t" else " " for character in text)
