"""The options of commands that speak with a server."""

import argparse
from typing import TYPE_CHECKING, Any

from .engine import positive

if TYPE_CHECKING:
    from ...runtime.api.sampling_params import SamplingParams
    from ...runtime.client.client import Client


def seconds(text: str) -> float:
    """A number of seconds above 0, for argparse."""
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 86400 seconds")
    return value


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Where the server is."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--address",
        metavar="ADDRESS",
        help="ipc:///path or tcp://host:port (default: $SIDESTREAM_ADDRESS, or where `sidestream serve` listens by "
        "default)",
    )
    group.add_argument(
        "--keys", metavar="DIR", help="this client's folder of `sidestream keygen`; needed beyond this machine"
    )
    group.add_argument(
        "--connect-timeout",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds to wait for a server (default: %(default)s)",
    )


def add_sampling_options(parser: argparse.ArgumentParser, temperature: float, max_tokens: int) -> None:
    """How the answer is drawn."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=positive, default=max_tokens, metavar="N", help="longest answer (default: %(default)s)"
    )
    group.add_argument(
        "--temperature", type=float, default=temperature, help="0 takes the likeliest token (default: %(default)s)"
    )
    group.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="0 switches it off (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--stop", action="append", default=None, metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    group.add_argument("--seed", type=int, help="make the draw repeatable")


def sampling_params(options: argparse.Namespace, **more: Any) -> "SamplingParams":
    """The sampling parameters that were asked for. Raises RequestError."""
    from ...runtime.api.sampling_params import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed")
    return SamplingParams(**({name: getattr(options, name) for name in names} | more))


def connect(options: argparse.Namespace) -> "Client":
    """A client that has found its server. Raises EngineDeadError when nothing answers."""
    from ...runtime.client.client import Client

    client = Client(options.address, keys=options.keys, connect_timeout=options.connect_timeout)
    try:
        client.connect()
    except BaseException:
        client.close()
        raise
    return client


def harmless(text: str) -> str:
    """A model's text without what a terminal would obey: line ends and tabs stay, other control characters become
    spaces.
    """
    return "".join(character if character.isprintable() or character in "\n\t" else " " for character in text)
