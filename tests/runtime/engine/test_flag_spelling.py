"""Options in messages are spelled as the interface spells them, and every flag that is named is one of `serve`."""

import pytest
from sidestream.runtime.adapters.registry import AdapterRegistry
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.engine.flag_spelling import PYTHON_ONLY, server_options, with_flags, with_server_flags
from sidestream.runtime.engine.options import keywords
from sidestream.runtime.protocol.framing import decode_from_server
from sidestream.runtime.protocol.messages import Error
from sidestream.runtime.server.connections import ClientConnection, Connections
from sidestream.tools.cli import build_parser


def flags(command: str) -> set[str]:
    (commands,) = (action.choices for action in build_parser()._actions if action.choices)
    return set(commands[command]._option_string_actions)


def test_every_option_is_a_flag_of_serve_or_pythons_alone() -> None:
    named = {with_flags(f"{name}=1", keywords()).partition(" ")[0] for name in keywords() if name not in PYTHON_ONLY}
    assert len(named) > 20 and named <= flags("serve")
    taken = {"--dtype", "--enable-prefix-caching"}  # as flags of vLLM
    assert not {f"--{name.replace('_', '-')}" for name in PYTHON_ONLY} & (flags("serve") - taken)
    assert {f"--{name.replace('_', '-')}" for name in server_options()} <= flags("serve")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("max_num_seqs=0 must be at least 1", "--max-num-seqs 0 must be at least 1"),
        ("raise max_model_len, or lower num_kv_pages.", "raise --max-model-len, or lower --num-kv-pages."),
        ("kv_dtype='int8' is not known", "--kv-cache-dtype 'int8' is not known"),
        ("start with lora_lenient=True", "start with --lora-lenient"),
        ("use device='cpu'; a device that is there", "use --device 'cpu'; a device that is there"),
        ("enable_prefix_caching=False keeps", "--no-prefix-caching keeps"),
        ("add adapters={'sql': '/data/my sql'}", "add --lora-modules sql=/data/my sql"),
        ("give it to LLM(adapters=...) or call add_adapter first", "name it with --lora-modules NAME=DIR"),
        ("/data/max_loras/x.max_loras and 'max_loras'", "/data/max_loras/x.max_loras and 'max_loras'"),
        ("max_loras_of_mine and my_max_loras=3", "max_loras_of_mine and my_max_loras=3"),
    ],
)
def test_keywords_become_flags(text: str, wanted: str) -> None:
    options = {"disable_pass" if name == "disable_passes" else name for name in keywords()}
    assert with_flags(text, options) == wanted


def test_fields_of_requests_stay_in_a_servers_messages() -> None:
    text = "min_tokens=3 exceeds max_tokens=2; speculation='auto' needs more; raise max_model_len"
    assert with_server_flags(text) == text.replace("max_model_len", "--max-model-len")


class Wire:
    """Keeps the frames that a listener would send."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, identity: bytes, frame: bytes) -> None:
        self.frames.append(frame)


def test_a_client_of_a_server_is_told_flags_and_a_caller_of_python_keywords() -> None:
    wire = Wire()
    connections = Connections(wire, bytes(16))  # type: ignore[arg-type]
    client = ClientConnection(b"x", 1, 0.0, 0.0)
    connections.send(client, Error("adapter_error", "rank 64 is above 16: start with max_lora_rank=64 or more", call=1))
    message = decode_from_server(wire.frames[0]).message
    assert isinstance(message, Error) and "start with --max-lora-rank 64 or more" in message.message
    registry = AdapterRegistry.__new__(AdapterRegistry)
    registry.numbers, registry.max_adapters = {"sql": 0}, 9
    with pytest.raises(RequestError, match="or give replace=True"):
        registry._check_room("sql", False)
