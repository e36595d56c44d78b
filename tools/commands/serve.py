"""`sidestream serve`: serve a model and its adapters."""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

from ...runtime.api.errors import RequestError
from ...runtime.api.sampling_defaults import check_override
from ..options.config_file import ConfigAction
from ..options.engine import (
    add_command,
    add_engine_options,
    add_model,
    add_option,
    add_value,
    advanced,
    check_output,
    given,
    json_object,
    llm_arguments,
    positive,
    report,
    seconds,
)
from ..options.gateway import add_gateway_options, gateway_settings, start_logging
from ..options.launcher_flags import add_launcher_flags

DESCRIPTION = """\
Serve a model and its adapters until SIGTERM or Ctrl-C, then finish open requests and stop.

HTTP at http://127.0.0.1:8000 is compatible with OpenAI and vLLM. `sidestream chat`, `sidestream generate --server`,
sidestream.Client and sidestream.AsyncClient use the protocol of docs/protocol.md, by default over a socket file that
only you can reach. --bind may be tcp on the loopback; other addresses need keys (`sidestream keys curve`)."""

EXAMPLES = """\
examples:
  sidestream serve                                                    the demo model with its four adapters
  sidestream serve models/llama --lora-modules sql=adapters/sql chat=adapters/chat
  sidestream serve models/llama --host 0.0.0.0 --api-keys keys.toml   keys: `sidestream keys http add`
  sidestream serve models/llama --no-http --bind tcp://127.0.0.1:5757
  sidestream serve models/llama --bind tcp://0.0.0.0:5757 --keys keys/server
  sidestream serve --config server.toml --no-restart

server.toml has the flags as keys:
  model = "models/llama"
  max-num-seqs = 128
  [lora-modules]
  sql = "adapters/sql\""""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s [MODEL] [--lora-modules NAME=DIR ...] [--bind ADDRESS] [options]"
    parser = add_command(commands, "serve", "serve a model and its adapters", DESCRIPTION, EXAMPLES, run, usage)
    add_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--bind", metavar="ADDRESS", help="ipc:///absolute/path or tcp://host:port (default: a socket file of your own)"
    )
    group.add_argument(
        "--keys", metavar="DIR", help="the server's folder of `sidestream keys curve`; needed beyond this machine"
    )
    group.add_argument("--engine-keys", metavar="DIR", help="a client's folder, for HTTP if there are --keys")
    group.add_argument("--no-http", action="store_true", help="answer no HTTP")
    group.add_argument(
        "--config", action=ConfigAction, metavar="FILE", help="a TOML file of flags; the command line wins"
    )
    add_value(group, "--drain-seconds", 30.0, "time for open requests after SIGTERM", seconds, "S")
    group.add_argument(
        "--restart",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="restart processes that die or hang (default: on)",
    )
    group.add_argument(
        "--step-timeout",
        type=seconds,
        metavar="S",
        help="kill the GPU process when a step takes longer (default: ten times the estimated longest step, at least "
        "120 s; on a CPU ten times the longest of the last steps, at least 600 s); 0: never",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="the model's names for clients (default: the directory's); answers have the first one",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template, as a file or as text, instead of the model's chat_template.jinja or "
        "tokenizer_config.json; an adapter with its own template uses that one",
    )
    group.add_argument(
        "--data-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="engines of the same model with one HTTP front, each on a GPU of its own (default: %(default)s); "
        "they listen at engine-0.sock, engine-1.sock ..., or at ports in a row",
    )
    group.add_argument(
        "--prefill-engines",
        type=positive,
        default=0,
        metavar="N",
        help="engines that only compute prompts, each on a GPU of its own; needs --decode-engines (default: none)",
    )
    group.add_argument(
        "--decode-engines",
        type=positive,
        default=0,
        metavar="N",
        help="engines that answer with the KV pages of prefill engines; --kv-host-gb is the memory of each prefill "
        "engine for these pages (then by default 8)",
    )
    add_value(
        group,
        "--prefill-min-tokens",
        256,
        "with --prefill-engines: shorter prompts, without cached tokens, are computed by decode engines",
    )
    add_value(group, "--max-waiting", 4096, "waiting requests before others are refused")
    add_value(group, "--max-update-bytes", 1 << 30, "limit on an update of an adapter from a client's memory")
    group.add_argument(
        "--allow-adapter-loading",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let clients load and unload adapters (default: only through a socket file)",
    )
    group.add_argument(
        "--adapter-root",
        action="append",
        default=[],
        metavar="DIR",
        help="directory, or address such as s3://bucket/adapters or hf:// for fsspec, from which clients may load "
        "adapters; may be repeated (default: the directories of the given adapters)",
    )
    group.add_argument(
        "--save-adapters",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load the adapters that clients have loaded again when the server starts at the same address (default: "
        "on; saved below $XDG_STATE_HOME/sidestream)",
    )
    group.add_argument(
        "--receipt-key",
        metavar="FILE",
        help="a secret of at least 16 bytes with which receipts of answers are signed (receipt: true of a request)",
    )
    group.add_argument(
        "--receipts", action="store_true", help="answer all requests with a receipt; needs --receipt-key"
    )
    add_gateway_options(parser, ["--api-keys"])
    add_engine_options(parser)
    next(each for each in parser._action_groups if each.title == "adapters").add_argument(
        "--lora-modules-from",
        metavar="DIR",
        help="load an adapter from each folder of DIR; added, changed and removed folders are followed",
    )
    group = parser.add_argument_group("capacity")
    add_option(group, "num_kv_pages")
    add_option(group, "kv_host_gb")
    add_option(group, "kv_disk", metavar="DIR")
    add_option(group, "kv_disk_gb")
    add_option(group, "max_cpu_loras")
    add_option(group, "max_adapter_sums")
    add_option(group, "adapter_versions")
    add_option(group, "max_logprobs")
    add_option(group, "logprobs_mode")
    add_option(group, "enable_prefix_caching", "--no-prefix-caching")
    group.add_argument(
        "--trace-steps", metavar="FILE", help="profile a hundred decode steps, for idle time between them"
    )
    add_option(group, "load_format")
    add_option(
        group, "enable_prefix_caching", "--no-enable-prefix-caching", dest="no_prefix_caching", help=argparse.SUPPRESS
    )
    add_option(group, "generation_config", metavar="auto|vllm|DIR")
    add_option(group, "override_generation_config", metavar="JSON", type=sampling_defaults_in)
    add_option(advanced(parser), "fail_on_compilation")
    add_launcher_flags(parser)


def sampling_defaults_in(text: str) -> dict[str, Any]:
    """Return the JSON of --override-generation-config."""
    found = json_object(text)
    try:
        check_override(found)
    except RequestError as problem:
        raise argparse.ArgumentTypeError(f"{problem}; give JSON such as '{{\"temperature\": 0.7}}'") from None
    return found


def settings_of(options: argparse.Namespace) -> Any:
    """Return the options as `ServeSettings`. Raises ValueError for options that cannot be served."""
    from ...graphs.adapter_config import MAX_RANK
    from ...runtime.adapters.remote_adapter import absolute_root
    from ...runtime.engine.options import DEFAULT_MAX_LORAS
    from ...runtime.engine.vllm_keywords import DEFAULT_LORA_RANK
    from ...runtime.gateway.auth.usage_database import default_path
    from ...runtime.gateway.router.adapter_root import CONFIG, rank_in
    from ...runtime.protocol.addresses import default_address, parse
    from ...runtime.quantization.defaults import AUTO, OFF
    from ...runtime.server.settings import ServeSettings
    from ...runtime.text.chat_files import read_template_file
    from ...runtime.text.generation_config import sampling_defaults

    folder = options.lora_modules_from and str(Path(options.lora_modules_from).resolve())
    if folder is not None:
        _add_folder(options, folder)
    own = (
        "num_kv_pages",
        "kv_host_gb",
        "kv_disk",
        "kv_disk_gb",
        "max_cpu_loras",
        "max_adapter_sums",
        "adapter_versions",
        "max_logprobs",
        "logprobs_mode",
        "load_format",
        "generation_config",
        "override_generation_config",
    )
    llm = llm_arguments(options) | given(options, *own)
    if options.fail_on_compilation:
        llm["fail_on_compilation"] = True
    if options.no_prefix_caching:
        llm["enable_prefix_caching"] = False
    if llm.get("generation_config", AUTO) not in (AUTO, "vllm"):
        llm["generation_config"] = str(Path(llm["generation_config"]).resolve())
        sampling_defaults(None, llm["generation_config"])  # raise before anything is loaded
    if llm.get("calibration", OFF) not in (AUTO, OFF):
        llm["calibration"] = str(Path(llm["calibration"]).resolve())
    if "kv_disk" in llm:
        llm["kv_disk"] = str(Path(llm["kv_disk"]).resolve())
    model = str(Path(llm.pop("model")).resolve())
    adapters = {name: str(Path(path).resolve()) for name, path in llm.pop("adapters").items()}
    if folder is not None or options.resolve_adapters:  # adapters that are added later must fit
        configs = [Path(path, CONFIG).read_bytes() for path in adapters.values()]
        llm = {"max_loras": DEFAULT_MAX_LORAS, "lora_target_modules": ["all"]} | llm
        llm.setdefault("max_lora_rank", min(MAX_RANK, max([DEFAULT_LORA_RANK, *map(rank_in, configs)])))
    llm["disable_passes"] = list(llm.get("disable_passes", ()))
    names = options.served_model_name or [Path(model).name]
    if not all(names):
        raise ValueError("--served-model-name must not be empty; name the model, or leave it out")
    if adapters.keys() & set(names):
        raise ValueError(f"{min(adapters.keys() & set(names))!r} names the model and an adapter; rename one of them")
    bind = str(parse(options.bind or default_address()))
    allowed = options.allow_adapter_loading
    admin = bind.startswith("ipc://") if allowed is None else allowed
    if _loading_flag(options) is not None and not admin:
        raise ValueError(
            f"{_loading_flag(options)} loads adapters while the server runs, which is not allowed at this --bind; add "
            "--allow-adapter-loading"
        )
    if options.resolve_adapters and not options.adapter_root:
        raise ValueError("--resolve-adapters needs a directory with a folder for each adapter; add --adapter-root DIR")
    roots = [absolute_root(root) for root in options.adapter_root] or sorted(
        {str(Path(path).parent) for path in adapters.values()}
    )
    return ServeSettings(
        model=model,
        llm=llm,
        adapters=adapters,
        bind=bind,
        keys=options.keys and str(Path(options.keys).resolve()),
        drain_seconds=options.drain_seconds,
        restart=options.restart,
        step_timeout=options.step_timeout,
        admin=admin,
        adapters_folder=folder or "",
        adapter_roots=sorted({*roots, folder}) if folder is not None else roots,
        saved_adapters=str(default_path().parent / "adapters") if options.save_adapters else "",
        max_waiting=options.max_waiting,
        receipt_key="" if options.receipt_key is None else str(Path(options.receipt_key).resolve()),
        receipts=options.receipts,
        max_update_bytes=options.max_update_bytes,
        served_model_name=names[0],
        chat_template=None if options.chat_template is None else read_template_file(options.chat_template),
        gpu_command=[sys.executable, "-m", "sidestream.tools.bench.serving.traced_gpu"]
        if options.trace_steps is not None
        else [],
    )


def num_engines(options: argparse.Namespace, settings: Any) -> int:
    """Return the number of engines. Raises ValueError for numbers, or settings, that do not fit together."""
    from ...runtime.server.transfer.page_memory import check_split

    prefill, decode = options.prefill_engines, options.decode_engines
    if not prefill and not decode:
        return int(options.data_parallel_size)
    if not prefill or not decode:
        flags = ["--prefill-engines", "--decode-engines"]
        one, other = flags if prefill else reversed(flags)
        raise ValueError(f"{one} needs engines of the other kind; add {other} N")
    if options.data_parallel_size > 1:
        raise ValueError("--data-parallel-size contradicts --prefill-engines and --decode-engines; leave it out")
    if options.no_http:
        raise ValueError("--prefill-engines needs HTTP, whose process connects the engines; leave --no-http out")
    check_split(settings)
    return int(prefill + decode)


def _loading_flag(options: argparse.Namespace) -> str | None:
    """Return the flag for which the gateway loads adapters; None without one."""
    if options.lora_modules_from:
        return "--lora-modules-from"
    return "--resolve-adapters" if options.resolve_adapters else None


def _add_folder(options: argparse.Namespace, folder: str) -> None:
    """Add the adapters of --lora-modules-from. Raises ValueError for a name that is given twice, or no directory."""
    from ...runtime.gateway.router.adapter_root import AdapterRoot

    if not Path(folder).is_dir():
        raise ValueError(f"--lora-modules-from {folder} is not a directory; name one with a folder for each adapter")
    found = AdapterRoot(folder).scan()
    twice = found.keys() & dict(options.lora_modules).keys()
    if twice:
        raise ValueError(
            f"adapter {min(twice)!r} is in --lora-modules and in --lora-modules-from {folder}; rename one of them"
        )
    options.lora_modules = [*options.lora_modules, *((name, offer.path) for name, offer in found.items())]


def check_place(bind: str, keys: str | None) -> None:
    """Raise ValueError for an unusable address, or keys of another side, before a model is loaded."""
    from ...runtime.protocol.addresses import check_keys, parse
    from ...runtime.protocol.curve_keys import load_server_keys

    address = parse(bind)
    check_keys(address, keys is not None)
    if keys is not None:
        load_server_keys(keys)
    if address.scheme != "tcp" or not address.port:
        return
    host = "" if address.host == "*" else address.host
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, address.port))
        except socket.gaierror:
            return  # the name of a network interface is valid for ZeroMQ
        except OSError as error:
            raise ValueError(
                f"cannot listen at {address}: {error.strerror}; stop the process there, or choose another address "
                "with --bind"
            ) from None


def front_of(options: argparse.Namespace, settings: Any) -> Any:
    """Return the HTTP front; None if the engine has keys and HTTP has none.

    Raises ValueError for an address that is taken or open to everyone, and for keys that are not a client's, before a
    model is loaded.
    """
    from msgspec.structs import replace

    from ...runtime.gateway.router.adapter_root import AdapterRoot
    from ...runtime.gateway.server_process import listen
    from ...runtime.protocol.curve_keys import load_client_keys
    from ...runtime.server.supervisor_loop import GatewayProcess

    gateway = gateway_settings(options)
    if settings.keys is not None and options.engine_keys is None:
        report("no HTTP, since the engine requires keys: also give --engine-keys")
        return None
    if options.engine_keys is not None:
        load_client_keys(options.engine_keys)
    listener = listen(gateway.host, gateway.port)
    command = [sys.executable, "-m", "sidestream.runtime.gateway.server_process"]
    keys = options.engine_keys and str(Path(options.engine_keys).resolve())
    gateway = replace(gateway, engine_keys=keys, model_aliases=(options.served_model_name or [])[1:])
    if options.prefill_engines:
        split = {"prefill_engines": options.prefill_engines, "prefill_min_tokens": options.prefill_min_tokens}
        gateway = replace(gateway, **split)
    if options.resolve_adapters:
        gateway = replace(gateway, resolve_roots=settings.adapter_roots)
    if settings.adapters_folder:
        found = AdapterRoot(settings.adapters_folder).scan()
        versions = {name: found[name].version for name in settings.adapters.keys() & found.keys()}
        gateway = replace(gateway, adapters_folder=settings.adapters_folder, adapter_versions=versions)
    return GatewayProcess(command, lambda addresses: replace(gateway, engines=addresses), listener)


def run(options: argparse.Namespace) -> int:
    """Serve; return 0 after SIGTERM, 1 when a process died, 2 when the start failed."""
    from ...runtime.adapters.remote_adapter import is_remote
    from ...runtime.receipts.receipt import read_key
    from ...runtime.server.replica_supervisor import ReplicaSupervisor, addresses_of, devices_of
    from ...runtime.server.supervisor import Supervisor

    start_logging(options, "supervisor")
    if options.receipt_key is not None:
        read_key(options.receipt_key)
    elif options.receipts:
        raise ValueError("--receipts needs a key that signs them; add --receipt-key FILE")
    settings = settings_of(options)
    count = num_engines(options, settings)
    for address in [settings.bind] if count == 1 else addresses_of(settings.bind, count):
        check_place(address, settings.keys)
    devices_of(count, settings.llm.get("device"), ranks=settings.llm.get("tensor_parallel_size", 1))
    local = [root for root in options.adapter_root if not is_remote(root)]
    missing = next((root for root in local if not Path(root).is_dir()), None)
    if missing is not None:
        raise ValueError(f"--adapter-root {missing} is not a directory; name one that adapters may be loaded from")
    if options.trace_steps is not None:
        check_output("--trace-steps", Path(options.trace_steps))
        os.environ["SIDESTREAM_TRACE_STEPS"] = str(Path(options.trace_steps).resolve())
    front = None if options.no_http else front_of(options, settings)
    if front is None and options.prefill_engines:
        raise ValueError("--prefill-engines needs HTTP, whose process connects the engines; also give --engine-keys")
    if front is None and _loading_flag(options) is not None:
        raise ValueError(f"{_loading_flag(options)} needs HTTP, whose process loads the adapters; leave --no-http out")
    report(f"loading {settings.served_model_name} with {len(settings.adapters)} adapters")
    if count > 1:
        return ReplicaSupervisor(settings, count, report, front, options.prefill_engines).run()
    return Supervisor(settings, report, front).run()
