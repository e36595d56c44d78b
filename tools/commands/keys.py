"""`sidestream keys`: API keys of a gateway, and CURVE keys of an engine and its clients."""

import argparse
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ..options.engine import add_command, check_output, positive

HTTP_DESCRIPTION = """\
Make, list and revoke the API keys of a gateway (`sidestream serve --api-keys FILE`). FILE has hashes, owners, rights
and limits as TOML, and you may edit it; a key itself is shown once, when it is made. A running gateway applies each
change to its next request."""

HTTP_EXAMPLES = """\
examples:
  sidestream keys http add keys.toml --owner search    all models, no limits
  sidestream keys http add keys.toml --owner search --model llama 'sql-*' --tokens-per-minute 200000 --expires 90d
  sidestream keys http add keys.toml --owner operations --admin    may load and unload adapters
  sidestream keys http add keys.toml --owner prometheus --model --metrics    may read /metrics, and nothing else
  sidestream keys http list keys.toml
  sidestream keys http revoke keys.toml search    the only key of this owner
  sidestream keys http revoke keys.toml search-3f9a1c    a key by its name"""

CURVE_DESCRIPTION = """\
Make CURVE keys for an engine and its clients. Traffic over tcp is then encrypted, the engine accepts these clients
only, and they accept this engine only.

Secret files get mode 0600, and existing files are never overwritten; run it again with other names to add clients. To
remove a client, delete DIR/server/allowed/NAME.public: it cannot connect again, but an open connection stays."""

CURVE_EXAMPLES = """\
examples:
  sidestream keys curve keys/                                              one client, called `default`
  sidestream keys curve keys/ --client alice --client bob                  two more, for the same engine
  sidestream serve --bind tcp://0.0.0.0:5757 --keys keys/server
  sidestream chat --address tcp://gpu-host:5757 --keys keys/client-alice"""


def moment(text: str) -> datetime:
    """Parse a date (2026-12-31), a date with a time, or days from now (90d)."""
    if re.fullmatch(r"\d{1,5}d", text):
        return datetime.now(UTC).replace(microsecond=0) + timedelta(days=int(text[:-1]))
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} must be a date such as 2026-12-31, or days such as 90d") from None
    found = found if found.tzinfo else found.replace(tzinfo=UTC)
    if found <= datetime.now(UTC):
        raise argparse.ArgumentTypeError(f"{text} is in the past; give a later date, or days from now such as 90d")
    return found


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "keys", help="make keys of a gateway (http) or of an engine (curve)", description="Make keys."
    )
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    _add_http(kinds)
    usage = "%(prog)s DIR [--client NAME ...]"
    parser = add_command(
        kinds,
        "curve",
        "make keys of an engine on a network and of its clients",
        CURVE_DESCRIPTION,
        CURVE_EXAMPLES,
        run_curve,
        usage,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of the keys")
    parser.add_argument(
        "--client", action="append", default=[], metavar="NAME", help="a client; may be repeated (default: default)"
    )


def _add_http(kinds: "argparse._SubParsersAction[Any]") -> None:
    parser = add_command(kinds, "http", "make, list and revoke API keys of a gateway", HTTP_DESCRIPTION, HTTP_EXAMPLES)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    add = actions.add_parser("add", help="make a key", description="Make a key and print it; only its hash is stored.")
    add.add_argument("file", type=Path, metavar="FILE", help="the keys file; made with mode 0600 if it does not exist")
    add.add_argument("--owner", required=True, help="owner's name, for limits, logs and `sidestream usage`")
    add.add_argument("--name", help="the key's name in FILE (default: the owner's, with a number)")
    add.add_argument(
        "--model",
        nargs="*",
        default=["*"],
        metavar="PATTERN",
        help="allowed models and adapters, with wildcards * and ? (default: all; --model alone: none)",
    )
    add.add_argument("--requests-per-minute", type=positive, metavar="N", help="requests in any 60 seconds")
    add.add_argument(
        "--tokens-per-minute", type=positive, metavar="N", help="tokens of prompts and answers in 60 seconds"
    )
    add.add_argument(
        "--tokens-per-day", type=positive, metavar="N", help="tokens of prompts and answers in a day of UTC"
    )
    add.add_argument("--max-tokens", type=positive, metavar="N", help="tokens of one answer; longer answers are cut")
    add.add_argument("--admin", action="store_true", help="it may load and unload adapters")
    add.add_argument("--metrics", action="store_true", help="it may read /metrics, as an admin key may")
    add.add_argument("--expires", type=moment, metavar="DATE", help="end of validity: 2026-12-31, or 90d from now")
    add.set_defaults(run=run_add)
    listing = actions.add_parser(
        "list", help="show all keys", description="Show the keys of a file, without their hashes."
    )
    listing.add_argument("file", type=Path, metavar="FILE", help="the keys file")
    listing.set_defaults(run=run_list)
    revoke = actions.add_parser("revoke", help="revoke a key", description="Revoke a key; its next request fails.")
    revoke.add_argument("file", type=Path, metavar="FILE", help="the keys file")
    revoke.add_argument(
        "name", metavar="NAME", help="the key's name, as `sidestream keys http list` shows it, or an owner with one key"
    )
    revoke.set_defaults(run=run_revoke)


def run_add(options: argparse.Namespace) -> int:
    """Print the key alone to stdout, and its use to stderr."""
    from ...runtime.gateway.auth.edit_keys_file import add
    from ...runtime.gateway.auth.key_store import LIMITS, Key

    check_output("FILE", options.file)
    name = options.name or re.sub(r"[^A-Za-z0-9_-]", "-", options.owner)[:50] + f"-{os.urandom(3).hex()}"
    entry = Key(
        name,
        "",
        options.owner,
        tuple(options.model),
        **{limit: getattr(options, limit) for limit in LIMITS},
        admin=options.admin,
        metrics=options.metrics,
        created=datetime.now(UTC).replace(microsecond=0),
        expires=options.expires,
    )
    key = add(options.file, entry)
    print(key)
    print(
        f"This is key {name} of {options.owner}; it is shown only now. Clients send it as `Authorization: Bearer KEY`.",
        file=sys.stderr,
    )
    return 0


def run_list(options: argparse.Namespace) -> int:
    """Print one line per key."""
    from ...runtime.gateway.auth.key_store import Key, parse, read_bytes

    def limits(key: Key) -> str:
        named = {
            "requests/min": key.requests_per_minute,
            "tokens/min": key.tokens_per_minute,
            "tokens/day": key.tokens_per_day,
            "tokens/answer": key.max_tokens,
        }
        return ", ".join(f"{limit} {name}" for name, limit in named.items() if limit is not None) or "no limits"

    keys = parse(read_bytes(options.file), options.file)
    now = datetime.now(UTC)
    for name, key in keys.items():
        until = "" if key.expires is None else f"{'expired' if key.expired(now) else 'until'} {key.expires:%Y-%m-%d}"
        rights = [flag for flag in ("admin", "metrics") if getattr(key, flag)]
        columns = [name, key.owner, " ".join(key.models) or "no model", limits(key), *rights, until]
        print("  ".join(column for column in columns if column))
    return 0


def run_revoke(options: argparse.Namespace) -> int:
    """Remove the entry from the file."""
    from ...runtime.gateway.auth.edit_keys_file import revoke

    key = revoke(options.file, options.name)
    print(f"key {key.name} of {key.owner} is revoked", file=sys.stderr)
    return 0


def run_curve(options: argparse.Namespace) -> int:
    """Write the keys, and print the place of each folder."""
    from ...runtime.protocol.curve_keys import generate

    folders = generate(options.directory, options.client or ["default"])
    server = options.directory / "server"
    print(f"{server} stays with the engine:")
    print(f"  sidestream serve --bind tcp://0.0.0.0:5757 --keys {server}")
    for folder in folders:
        print(f"copy {folder} to this client over a secure channel:")
        print(f"  sidestream chat --address tcp://HOST:5757 --keys {folder}")
    return 0
