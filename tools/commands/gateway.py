"""`sidestream gateway`: OpenAI-compatible HTTP for running engines."""

import argparse
from typing import Any

from ..options.config_file import ConfigAction
from ..options.engine import add_command, add_value, report, seconds
from ..options.gateway import add_gateway_options, gateway_settings, start_logging

DESCRIPTION = """\
Answer HTTP, compatible with OpenAI and vLLM, for one or several engines (`sidestream serve --no-http`) on this machine
or others. After SIGTERM or Ctrl-C there are no new connections, and open answers are finished.

`sidestream serve` starts a gateway by itself; this command is for more gateways, another machine, or several
engines."""

EXAMPLES = """\
examples:
  sidestream gateway                       for `sidestream serve --no-http` on this machine
  sidestream gateway --engine tcp://gpu1:5757 --engine tcp://gpu2:5757 --engine-keys keys/client-gateway
  sidestream gateway --host 0.0.0.0 --keys keys.toml --access-log -"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s [--engine ADDRESS ...] [options]"
    parser = add_command(commands, "gateway", "answer HTTP for running engines", DESCRIPTION, EXAMPLES, run, usage)
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="address of an engine; may be repeated (default: that of `sidestream serve`)",
    )
    group.add_argument(
        "--adapter-root",
        action="append",
        default=[],
        metavar="DIR",
        help="an --adapter-root of the engines, which --resolve-adapters reads; may be repeated",
    )
    group.add_argument("--engine-keys", metavar="DIR", help="a client's folder of `sidestream keys curve`")
    group.add_argument(
        "--config", action=ConfigAction, metavar="FILE", help="a TOML file of flags; the command line wins"
    )
    add_value(group, "--drain-seconds", 30.0, "time for open answers after SIGTERM", seconds, "S")
    add_gateway_options(parser, ["--keys", "--api-keys"])


def run(options: argparse.Namespace) -> int:
    """Serve; return 0 after SIGTERM."""
    from msgspec.structs import replace

    from ...runtime.adapters.remote_adapter import absolute_root
    from ...runtime.gateway.server_process import listen, serve
    from ...runtime.protocol.addresses import check_keys, default_address, parse

    start_logging(options, "gateway")
    engines = options.engine or [default_address()]
    for engine in engines:
        check_keys(parse(engine), options.engine_keys is not None, "--engine-keys")
    if options.resolve_adapters and not options.adapter_root:
        raise ValueError("--resolve-adapters needs the engines' directory of adapters; add --adapter-root DIR")
    roots = list(map(absolute_root, options.adapter_root)) if options.resolve_adapters else []
    settings = replace(gateway_settings(options), engines=engines, engine_keys=options.engine_keys, resolve_roots=roots)
    if settings.keys is not None:
        report("limits of keys hold for this process; other gateways count on their own")
    with listen(settings.host, settings.port) as listener:
        return serve(settings, listener, _print_addresses)


def _print_addresses(url: str) -> None:
    report(f"answering HTTP at {url}")
    report(f"console at {url}/")
