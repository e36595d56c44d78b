"""`sidestream keys`: the API keys of a gateway."""

import argparse
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ..options.engine import check_output, positive

DESCRIPTION = """\
Make, list and revoke the API keys of a gateway (`sidestream gateway --keys FILE`). FILE holds hashes, owners, rights
and limits as TOML, and you may edit it; a key itself is shown once, when it is made. A running gateway follows each
change at its next request."""

EXAMPLES = """\
examples:
  sidestream keys add keys.toml --owner search                                    all models, no limits
  sidestream keys add keys.toml --owner search --model llama 'sql-*' --tokens-per-minute 200000 --expires 90d
  sidestream keys add keys.toml --owner operations --admin                        may load and unload adapters
  sidestream keys add keys.toml --owner prometheus --model --metrics              may read /metrics, and nothing else
  sidestream keys list keys.toml
  sidestream keys revoke keys.toml search                                         the only key of this owner
  sidestream keys revoke keys.toml search-3f9a1c                                  a key by its name"""


def moment(text: str) -> datetime:
    """A date (2026-12-31), a date with a time, or days from now (90d), for argparse."""
    if re.fullmatch(r"\d{1,5}d", text):
        return datetime.now(UTC).replace(microsecond=0) + timedelta(days=int(text[:-1]))
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} must be a date such as 2026-12-31, or days such as 90d") from None
    found = found if found.tzinfo else found.replace(tzinfo=UTC)
    if found <= datetime.now(UTC):
        raise argparse.ArgumentTypeError(f"{text} is over; name a day to come, or days from now such as 90d")
    return found


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "keys",
        help="make, list and revoke API keys of a gateway",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    add = actions.add_parser(
        "add", help="make a key", description="Make a key and print it; it is stored as a hash and shown only now."
    )
    add.add_argument("file", type=Path, metavar="FILE", help="the keys file; made with mode 0600 if there is none")
    add.add_argument("--owner", required=True, help="who uses it: a name for limits, logs and `sidestream usage`")
    add.add_argument("--name", help="the key's name in FILE (default: the owner's, with a number)")
    add.add_argument(
        "--model",
        nargs="*",
        default=["*"],
        metavar="PATTERN",
        help="models and adapters that it may use; * stands for any characters, ? for one (default: all; none after "
        "--model: none)",
    )
    add.add_argument("--requests-per-minute", type=positive, metavar="N", help="requests in any 60 seconds")
    add.add_argument(
        "--tokens-per-minute", type=positive, metavar="N", help="tokens of prompts and answers in 60 seconds"
    )
    add.add_argument(
        "--tokens-per-day", type=positive, metavar="N", help="tokens of prompts and answers in a day of UTC"
    )
    add.add_argument("--max-tokens", type=positive, metavar="N", help="tokens of one answer; longer ones are cut")
    add.add_argument("--admin", action="store_true", help="it may load and unload adapters")
    add.add_argument("--metrics", action="store_true", help="it may read /metrics, as an admin's may")
    add.add_argument("--expires", type=moment, metavar="DATE", help="when it ends: 2026-12-31, or 90d from now")
    add.set_defaults(run=run_add)
    listing = actions.add_parser(
        "list", help="show all keys", description="Show the keys of a file, without their hashes."
    )
    listing.add_argument("file", type=Path, metavar="FILE", help="the keys file")
    listing.set_defaults(run=run_list)
    revoke = actions.add_parser(
        "revoke", help="take a key away", description="Take a key away; it fails at its next request."
    )
    revoke.add_argument("file", type=Path, metavar="FILE", help="the keys file")
    revoke.add_argument(
        "name", metavar="NAME", help="the key's name, as `sidestream keys list` shows it, or an owner who has one key"
    )
    revoke.set_defaults(run=run_revoke)


def run_add(options: argparse.Namespace) -> int:
    """Prints the key alone to stdout, and what to do with it to stderr."""
    from ...runtime.gateway.auth.keys import LIMITS, Key
    from ...runtime.gateway.auth.keys_file import add

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
    """One line a key."""
    from ...runtime.gateway.auth.keys import Key, parse, read_bytes

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
    """Takes the entry out of the file."""
    from ...runtime.gateway.auth.keys_file import revoke

    key = revoke(options.file, options.name)
    print(f"key {key.name} of {key.owner} is revoked", file=sys.stderr)
    return 0
