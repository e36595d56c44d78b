"""`sidestream keygen`: the keys that an engine needs to be reached over a network."""

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Make CURVE keys for an engine and its clients: traffic over tcp is encrypted, the engine admits these clients only, and
they speak to this engine only.

Secret files get mode 0600 and nothing is ever overwritten; run it again with other names to add clients. To shut a
client out, remove DIR/server/allowed/NAME.public: it cannot connect again (a connection that is open stays until it
ends)."""

EXAMPLES = """\
examples:
  sidestream keygen keys/                                              one client, called `default`
  sidestream keygen keys/ --client alice --client bob                  two more, for the same engine
  sidestream serve --bind tcp://0.0.0.0:5757 --keys keys/server
  sidestream chat --address tcp://gpu-host:5757 --keys keys/client-alice"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "keygen",
        help="make keys, for an engine that is reached over a network",
        usage="%(prog)s DIR [--client NAME ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the keys go")
    parser.add_argument(
        "--client",
        action="append",
        default=[],
        metavar="NAME",
        help="a client to make keys for; may be repeated (default: default)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the keys and says which folder goes where."""
    from ...runtime.protocol.curve_keys import generate

    folders = generate(options.directory, options.client or ["default"])
    server = options.directory / "server"
    print(f"{server} stays with the engine:")
    print(f"  sidestream serve --bind tcp://0.0.0.0:5757 --keys {server}")
    for folder in folders:
        print(f"{folder} goes to this client, by a safe way:")
        print(f"  sidestream chat --address tcp://HOST:5757 --keys {folder}")
    return 0
