"""What a newcomer gets wrong in the first hour: each mistake ends in one line that names the thing and says what to do.

`{NAME}` in an argument is a path that `places` made.
"""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sidestream
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.tools import cli

ASK = ("generate", "-p", "hi")
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1000\n"
QUICK = ("--connect-timeout", "0.2")

KEYED = ("serve", "--bind", "tcp://127.0.0.1:0", "--keys", "{keys}/server")

# (what is wrong, the command line, what the line must name, what it must advise)
WRONG: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    # the command itself
    ("no command", (), "COMMAND", "--help"),
    ("a command misspelled", ("generat",), "generat", "did you mean generate?"),
    ("a flag misspelled", (*ASK, "--hadamrd", "on"), "--hadamrd", "did you mean --hadamard?"),
    ("a flag of nothing", (*ASK, "--zzz"), "--zzz", "sidestream generate --help"),
    ("one argument too many", ("demo", "models/llama"), "models/llama", "sidestream demo --help"),
    # model directories
    ("no such model", ("generate", "{nowhere}", "-p", "hi"), "{nowhere}", "leave MODEL out for the demo model"),
    ("a file as model", ("generate", "{file}", "-p", "hi"), "{file}", "Hugging Face format"),
    ("no such model to serve", ("serve", "{nowhere}"), "{nowhere}", "Hugging Face format"),
    ("no such model to dump", ("inspect", "dump", "{nowhere}"), "{nowhere}", "Hugging Face format"),
    ("config.json is not JSON", ("generate", "{not_json}", "-p", "hi"), "{not_json}/config.json", "save it again"),
    ("config.json is empty", ("generate", "{empty}", "-p", "hi"), "{empty}/config.json", "save it again"),
    ("config.json is a list", ("generate", "{a_list}", "-p", "hi"), "{a_list}/config.json", "save it again"),
    ("another architecture", ("generate", "{gpt_oss}", "-p", "hi"), "GptOssForCausalLM", "or a dense model"),
    ("a size that is text", ("generate", "{odd_size}", "-p", "hi"), "hidden_size", "correct config.json"),
    ("no layers", ("generate", "{no_layers}", "-p", "hi"), "num_hidden_layers", "correct config.json"),
    ("an unknown dtype of weights", ("generate", "{int4}", "-p", "hi"), "int4", "bfloat16, float16, float32"),
    ("an unknown RoPE", ("generate", "{dynamic}", "-p", "hi"), "dynamic", "remove it"),
    ("no weights", ("generate", "{weightless}", "-p", "hi"), "{weightless}", "Hugging Face checkpoint"),
    ("a pointer for weights", ("generate", "{lfs}", "-p", "hi"), "model.safetensors", "git lfs pull"),
    (
        "a pointer for a tokenizer",
        ("generate", "{lfs_words}", "-p", "hi"),
        "{lfs_words}/tokenizer.json",
        "git lfs pull",
    ),
    ("weights cut off", ("generate", "{cut}", "-p", "hi"), "model.safetensors", "download or copy it again"),
    ("no tokenizer", ("generate", "{mute}", "-p", "hi"), "tokenizer", "token ids"),
    ("a broken tokenizer", ("generate", "{babble}", "-p", "hi"), "{babble}/tokenizer.json", "copy it again"),
    # adapters
    ("an adapter without a name", (*ASK, "--lora-modules", "adapters/sql"), "adapters/sql", "NAME=DIRECTORY"),
    ("a bad name", (*ASK, "--lora-modules", "a b=x"), "a b=x", "a name has letters"),
    ("a name twice", (*ASK, "--lora-modules", "x=a", "x=b"), "twice", "its own name"),
    ("no such adapter", (*ASK, "--lora-modules", "x={nowhere}"), "{nowhere}", "save_pretrained"),
    ("an adapter cut off", (*ASK, "--lora-modules", "x={cut_adapter}"), "adapter_model", "save the adapter again"),
    ("an adapter without weights", (*ASK, "--lora-modules", "x={bare_adapter}"), "{bare_adapter}", "save the adapter"),
    ("DoRA without magnitudes", (*ASK, "--lora-modules", "x={dora}"), "use_dora = True", "save the adapter again"),
    ("rank 0", (*ASK, "--lora-modules", "x={rank_0}"), "r must be a positive integer", "save the adapter again"),
    ("a rank above the limit", (*ASK, "--max-lora-rank", "2"), "above the limit of 2", "--max-lora-rank 32"),
    ("an adapter that is not loaded", (*ASK, "-a", "pirat"), "'pirat'", "loaded: json, pirate, shout, yoda"),
    ("adapters for no prompt", (*ASK, "-a", "shout", "-a", "none"), "2 adapters for 1 prompts", "give one for all"),
    ("too many slots", (*ASK, "--max-loras", "1000"), "--max-loras 1000", "from 0 to 256"),
    ("an adapter misspelled", (*ASK, "-a", "pirat"), "'pirat'", "did you mean pirate?"),
    ("a model as adapter", (*ASK, "--lora-modules", "x={model}"), "{model} contains a model", "not an adapter"),
    (
        "an adapter as model",
        ("generate", "{dora}", "-p", "hi"),
        "{dora} is a LoRA adapter",
        "--lora-modules dora={dora}",
    ),
    ("a pointer of Git LFS", (*ASK, "--lora-modules", "x={lfs_adapter}"), "adapter_model.safetensors", "git lfs pull"),
    ("a hub id", (*ASK, "--lora-modules", "x=nobody-zz/none-zz"), "nobody-zz/none-zz", "hf download"),
    ("JSON of no adapter", (*ASK, "--lora-modules", '{"name": "x"}'), '{"name": "x"}', '"path": "adapters/pirate"'),
    # precision and passes
    ("an unknown precision", (*ASK, "--precision", "fp4"), "'fp4'", "'int8', 'fp8', 'bf16', 'fp32'"),
    ("an unknown KV dtype", (*ASK, "--kv-cache-dtype", "fp16"), "'fp16'", "'bf16'"),
    ("two that contradict", (*ASK, "--precision", "bf16", "--kv-cache-dtype", "int8"), "-dtype 'int8'", "'auto'"),
    ("an unknown pass", (*ASK, "--disable-pass", "fuse_silu"), "'fuse_silu'", "did you mean 'fuse_silu_mul'?"),
    ("a pass that must run", (*ASK, "--disable-pass", "normalize"), "'normalize'", "can't be disabled"),
    ("a layer that there is not", (*ASK, "--hadamard", "99"), "layer 99", "layers 0 to 3"),
    ("layers backwards", (*ASK, "--center-keys", "5-2"), "5-2", "write 2-5"),
    ("no layers at all", (*ASK, "--hadamard", "some"), "'some'", "0,3-7"),
    ("no such calibration", (*ASK, "--calibration", "{nowhere}"), "{nowhere}", "sidestream calibrate"),
    ("a file that is no calibration", (*ASK, "--calibration", "{file}"), "{file}", "sidestream calibrate"),
    # numbers
    ("a temperature that is no number", (*ASK, "--temperature", "nan"), "--temperature nan", "from 0 to 100"),
    ("no probability", (*ASK, "--top-p", "0"), "--top-p 0.0", "above 0 and at most 1"),
    ("no tokens", (*ASK, "--max-tokens", "0"), "--max-tokens", "at least 1"),
    ("tokens in words", (*ASK, "--max-tokens", "many"), "'many'", "--help"),
    ("all of the memory and more", (*ASK, "--gpu-memory-utilization", "1.5"), "1.5", "at most 1"),
    ("memory that is no number", (*ASK, "--gpu-memory-utilization", "nan"), "nan", "at most 1"),
    ("a seed too large", (*ASK, "--seed", "9" * 30), "--seed 999", "an integer from"),
    (
        "steps too small",
        (*ASK, "--max-num-seqs", "16", "--max-num-batched-tokens", "4"),
        "batched-tokens 4 is less",
        "raise --max-num-batched-tokens",
    ),
    ("no such device", (*ASK, "--device", "tpu"), "'tpu'", "'cpu'"),
    ("a negative number of documents", ("eval", "--smoke", "--documents", "-1"), "-1", "at least 1"),
    # prompts
    ("an empty prompt", ("generate", "-p", ""), "a prompt is empty", "give it some text"),
    (
        "an empty prompt to a server",
        ("generate", "--server", "-p", " ", *QUICK),
        "a prompt is empty",
        "give it some text",
    ),
    ("a prompt too long", ("generate", "-p", "hi " * 5000), "10002 tokens", "shorten it"),
    ("ids that are none", ("generate", "--prompt-ids", "1,two"), "'1,two'", "0,17,42"),
    ("an id outside the vocabulary", ("generate", "--prompt-ids", "999999"), "999999", "another model's tokenizer?"),
    ("an empty stop", (*ASK, "--stop", ""), "--stop ''", "1 to 1024 characters"),
    # files that are read or written
    ("no such option file", ("serve", "--config", "{nowhere}"), "{nowhere}", "No such file"),
    ("a file that is not TOML", ("serve", "--config", "{bad_toml}"), "{bad_toml}", "line 1"),
    ("a key that there is not", ("serve", "--config", "{bad_key}"), "max-num-seq ", "did you mean max-num-seqs?"),
    ("a value of another kind", ("serve", "--config", "{bad_value}"), "enforce-eager", "true or false"),
    ("a dump into a file", ("inspect", "dump", "-o", "{file}"), "{file}", "name a directory"),
    ("a dump below a file", ("inspect", "dump", "-o", "{file}/dump"), "{file}/dump", "name a directory of your own"),
    ("a demo's dump into a file", ("demo", "-o", "{file}"), "{file}", "name a directory"),
    ("a ledger into a directory", ("inspect", "ledger", "--json", "{folder}"), "{folder}", "name a file"),
    ("a calibration into nowhere", ("calibrate", "-o", "{nowhere}/c"), "{nowhere}/c", "existing directory"),
    ("figures into nowhere", ("eval", "--output-json", "{nowhere}/e"), "--output-json", "existing directory"),
    ("no text to calibrate with", ("calibrate", "--prompts", "{nowhere}"), "{nowhere}", "name a text file"),
    ("a layer to dump", ("inspect", "dump", "--layers", "99"), "--layers 99", "layers 0 to 3"),
    ("no bucket", ("inspect", "dump", "--bucket", "decode:0"), "decode:0", "decode:8"),
    (
        "ranks without adapters",
        ("inspect", "dump", "{model}", "--max-lora-rank", "8"),
        "--max-lora-rank",
        "--max-loras N",
    ),
    (
        "timings from two places",
        ("inspect", "dump", "--measured", "x", "--measure"),
        "--measured FILE",
        "measure here, or",
    ),
    ("a diff of no dumps", ("inspect", "diff", "{folder}", "{folder}"), "{folder}", "sidestream inspect dump -o"),
    ("a diff of files", ("inspect", "diff", "{file}", "{file}"), "{file}", "sidestream inspect dump -o"),
    ("an arm that there is not", ("eval", "--arms", "nope"), "'nope'", "arms: "),
    ("a shape that there is not", ("inspect", "explain", "--shape", "llama-9"), "llama-9", "llama-3.1-8b"),
    ("a GPU without figures", ("inspect", "explain", "--gpu", "B200"), "'B200'", "H200"),
    # benches
    ("a start of no model", ("bench", "startup", "--model", "{nowhere}"), "{nowhere}", "give a directory"),
    ("a bench of no model", ("bench", "latency", "--model", "{nowhere}"), "{nowhere}", "give a directory"),
    ("answers too short", ("bench", "latency", "--output-len", "32"), "--output-len 32", "above 32"),
    ("its figures to nowhere", ("bench", "throughput", "--output-json", "{nowhere}/b"), "--output-json", "existing"),
    # servers and clients
    ("no server", ("generate", "--server", "ipc://{folder}/s", "-p", "x", *QUICK), "{folder}", "sidestream serve"),
    ("a chat with nobody", ("chat", "--address", "ipc://{nowhere}/s", *QUICK), "{nowhere}", "sidestream serve"),
    ("nobody at a port", ("chat", "--address", "tcp://127.0.0.1:1", *QUICK), "tcp://127.0.0.1:1", "sidestream serve"),
    ("an unknown scheme", ("generate", "--server", "http://x", "-p", "x"), "'http://x'", "tcp://127.0.0.1:5757"),
    ("a port too high", ("generate", "--server", "tcp://x:99999", "-p", "x"), "99999", "above 65535"),
    ("a relative socket", ("chat", "--address", "ipc://engine.sock"), "ipc://engine.sock", "absolute path"),
    ("no time to connect", ("chat", "--connect-timeout", "0"), "--connect-timeout", "above 0"),
    ("no such keys", ("chat", "--keys", "{nowhere}"), "{nowhere}/client.secret", "sidestream keys curve"),
    ("the server's keys for a client", ("chat", "--keys", "{keys}/server"), "client.secret", "sidestream keys curve"),
    (
        "keys of another server",
        ("chat", "--keys", "{keys}/client-default", "--address", "tcp://127.0.0.1:{busy}", *QUICK),
        "tcp://127.0.0.1:{busy}",
        "its keys do not match these",
    ),
    ("a bad client's name", ("keys", "curve", "{folder}/k", "--client", "../x"), "'../x'", "1 to 64 letters"),
    ("keys that are there", ("keys", "curve", "{keys}"), "'default' has keys", "choose another name"),
    (
        "a network without keys",
        ("serve", "--bind", "tcp://0.0.0.0:5757"),
        "tcp://0.0.0.0:5757",
        "sidestream keys curve",
    ),
    ("a busy port", ("serve", "--bind", "tcp://127.0.0.1:{busy}"), "tcp://127.0.0.1:{busy}", "choose another address"),
    (
        "a client's keys for the server",
        ("serve", "--bind", "tcp://127.0.0.1:0", "--keys", "{keys}/client-default"),
        "server.secret",
        "sidestream keys curve",
    ),
    (
        "a secret that others can read",
        ("serve", "--bind", "tcp://127.0.0.1:0", "--keys", "{open_keys}/server"),
        "{open_keys}/server/server.secret is open to other users (mode 644)",
        "chmod 600",
    ),
    (
        "a client's secret that others can read",
        ("chat", "--keys", "{open_keys}/client-default"),
        "{open_keys}/client-default/client.secret",
        "chmod 600",
    ),
    (
        "a secret of HTTP's that others can read",
        (*KEYED, "--engine-keys", "{open_keys}/client-default"),
        "{open_keys}/client-default/client.secret",
        "chmod 600",
    ),
    ("adapters from nowhere", ("serve", "--adapter-root", "{nowhere}"), "--adapter-root {nowhere}", "name one"),
    (
        "a trace to nowhere",
        ("serve", "--trace-steps", "{nowhere}/t"),
        "--trace-steps {nowhere}/t",
        "existing directory",
    ),
    # HTTP, its keys and its records
    ("no such port", ("serve", "--port", "99999"), "--port", "from 0 to 65535"),
    ("a port in words", ("gateway", "--port", "many"), "'many'", "gateway --help"),
    ("HTTP for everyone", ("serve", "--host", "0.0.0.0"), "--host 0.0.0.0", "sidestream keys http add"),
    ("a gateway for everyone", ("gateway", "--host", "0.0.0.0"), "--host 0.0.0.0", "--api-key"),
    ("a port of another server", ("serve", "--port", "{busy}"), "port {busy}", "choose another port with --port"),
    (
        "another machine's address",
        ("serve", "--host", "192.0.2.1", "--insecure"),
        "192.0.2.1",
        "this machine with --host",
    ),
    ("an empty key", ("serve", "--api-key", ""), "--api-key is empty", "give a key"),
    (
        "one key and many",
        ("serve", "--api-key", "x", "--api-keys", "{keys_toml}"),
        "--api-key",
        "add these keys to the file with their rights",
    ),
    ("no such keys file", ("serve", "--api-keys", "{nowhere}"), "{nowhere}", "sidestream keys http add"),
    ("keys that are not TOML", ("gateway", "--keys", "{bad_toml}"), "{bad_toml}", "line 1"),
    (
        "a usage log in nowhere",
        ("serve", "--usage-log", "{nowhere}/u"),
        "--usage-log {nowhere}/u",
        "existing directory",
    ),
    (
        "payloads without a log",
        ("serve", "--usage-log", "none", "--log-payloads"),
        "--log-payloads",
        "leave --usage-log",
    ),
    ("an access log in nowhere", ("serve", "--access-log", "{nowhere}/a"), "{nowhere}/a", "existing directory"),
    (
        "sampling defaults from nowhere",
        ("serve", "--bind", "tcp://127.0.0.1:0", "--no-http", "--generation-config", "{nowhere}"),
        "{nowhere}/generation_config.json",
        "as --generation-config, or",
    ),
    ("metrics of a third", ("serve", "--metrics-compat", "tgi"), "'tgi'", "'vllm'"),
    ("a collector without a scheme", ("serve", "--otel-endpoint", "host:4318"), "host:4318", "http://localhost:4318"),
    ("no connections", ("gateway", "--max-connections", "0"), "--max-connections", "at least 1"),
    ("an engine by HTTP", ("gateway", "--engine", "http://x"), "'http://x'", "tcp://127.0.0.1:5757"),
    ("an engine far away", ("gateway", "--engine", "tcp://10.0.0.1:5757"), "10.0.0.1", "--engine-keys"),
    (
        "no such engine keys",
        ("gateway", "--engine-keys", "{nowhere}"),
        "{nowhere}/client.secret",
        "sidestream keys curve",
    ),
    ("nothing to do with keys", ("keys",), "KIND", "keys --help"),
    ("an action misspelled", ("keys", "http", "revok"), "'revok'", "did you mean revoke?"),
    ("a key of nobody", ("keys", "http", "add", "{keys_toml}"), "--owner", "keys http add --help"),
    ("an owner with a blank", ("keys", "http", "add", "{keys_toml}", "--owner", "a b"), "owner", "1 to 128 letters"),
    (
        "a key that is over",
        ("keys", "http", "add", "{keys_toml}", "--owner", "x", "--expires", "2001-01-01"),
        "2001-01-01",
        "90d",
    ),
    (
        "a date in words",
        ("keys", "http", "add", "{keys_toml}", "--owner", "x", "--expires", "soon"),
        "soon",
        "2026-12-31",
    ),
    ("keys below nowhere", ("keys", "http", "add", "{nowhere}/k", "--owner", "x"), "{nowhere}/k", "existing directory"),
    ("keys of nowhere", ("keys", "http", "list", "{nowhere}"), "{nowhere}", "sidestream keys http add"),
    ("no such key", ("keys", "http", "revoke", "{keys_toml}", "x"), "'x'", "sidestream keys http list"),
    ("no such usage log", ("usage", "{nowhere}"), "{nowhere}", "usage log"),
    ("a usage log of something else", ("usage", "{file}"), "{file}", "choose another file"),
    ("usage by colour", ("usage", "--by", "colour"), "--by colour", "owner, key, model"),
    ("usage since a word", ("usage", "--since", "lunch"), "lunch", "90m, 12h, 1d"),
    ("two formats", ("usage", "--json", "--csv"), "--csv", "usage --help"),
    ("seconds that are no number", ("serve", "--drain-seconds", "nan"), "nan", "from 0 to 86400 seconds"),
)


def _model(place: Path, **fields: Any) -> Path:
    """A copy of the demo model whose config has other fields."""
    shutil.copytree(DEMO_MODEL, place, ignore=shutil.ignore_patterns("adapters"))
    config = place / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return place


def _adapter(place: Path, **fields: Any) -> Path:
    shutil.copytree(DEMO_MODEL / "adapters" / "pirate", place)
    config = place / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return place


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def _cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Paths by name, and `busy`, a port at which nothing of ours listens."""
    root = tmp_path_factory.mktemp("w")
    folder = root / "folder"
    folder.mkdir(mode=0o700)
    found = {"nowhere": root / "nowhere", "folder": folder, "file": _written(root / "file", "x"), "keys": root / "keys"}
    for name, fields in {
        "model": {},
        "not_json": {},
        "empty": {},
        "a_list": {},
        "weightless": {},
        "cut": {},
        "mute": {},
        "lfs": {},
        "lfs_words": {},
        "babble": {},
        "gpt_oss": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
        "odd_size": {"hidden_size": "large"},
        "no_layers": {"num_hidden_layers": 0},
        "int4": {"torch_dtype": "int4"},
        "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    }.items():
        found[name] = _model(root / name, **fields)
    (found["not_json"] / "config.json").write_text("{not JSON")
    (found["empty"] / "config.json").write_text("")
    (found["a_list"] / "config.json").write_text("[1]")
    (found["weightless"] / "model.safetensors").unlink()
    (found["lfs"] / "model.safetensors").write_text(LFS)
    (found["lfs_words"] / "tokenizer.json").write_text(LFS)
    _cut(found["cut"] / "model.safetensors", 5000)
    (found["mute"] / "tokenizer.json").unlink()
    (found["babble"] / "tokenizer.json").write_text("{}")
    for name, fields in {
        "cut_adapter": {},
        "lfs_adapter": {},
        "bare_adapter": {},
        "dora": {"use_dora": True},
        "rank_0": {"r": 0},
    }.items():
        found[name] = _adapter(root / name, **fields)
    _cut(found["cut_adapter"] / "adapter_model.safetensors", 300)
    (found["lfs_adapter"] / "adapter_model.safetensors").write_text(LFS)
    (found["bare_adapter"] / "adapter_model.safetensors").unlink()
    for name, text in {
        "bad_toml": "a = = 3",
        "keys_toml": "",
        "bad_key": "max-num-seq = 3",
        "bad_value": "enforce-eager = 3",
    }.items():
        found[name] = _written(root / f"{name}.toml", text)
    found["open_keys"] = root / "open_keys"
    for name in ("keys", "open_keys"):
        assert cli.main(["keys", "curve", str(found[name])]) == 0
    for secret in found["open_keys"].rglob("*.secret"):
        secret.chmod(0o644)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield {name: str(path) for name, path in found.items()} | {"busy": str(busy.getsockname()[1])}


@pytest.mark.parametrize(("arguments", "names", "advises"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_mistake_is_one_line_that_names_the_thing_and_the_remedy(
    arguments: tuple[str, ...],
    names: str,
    advises: str,
    places: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", places["folder"])
    monkeypatch.delenv("SIDESTREAM_ADDRESS", raising=False)
    given = [_filled(argument, places) for argument in arguments]
    try:
        code = cli.main(given)
    except SystemExit as leave:
        code = int(leave.code or 0)
    shown = capsys.readouterr()
    assert code == 2, shown.err
    lines = shown.err.strip().splitlines()
    assert len(lines) == 1, shown.err
    assert "error: " in lines[0]
    assert _filled(names, places) in lines[0]
    assert _filled(advises, places) in lines[0]
    assert shown.out == ""


def _filled(text: str, places: dict[str, str]) -> str:
    for name, path in places.items():
        text = text.replace(f"{{{name}}}", path)
    return text


# (what is wrong, the call, what the message must name, what it must advise)
CALLS: tuple[tuple[str, Callable[[], Any], str, str], ...] = (
    ("no such model", lambda: sidestream.LLM("/no/such/model"), "/no/such/model", "download the model first"),
    ("a keyword misspelled", lambda: sidestream.LLM(max_model_ln=64), "'max_model_ln'", "did you mean 'max_model_len'"),
    ("an unknown precision", lambda: sidestream.LLM(precision="fp4"), "fp4", "int8"),
    ("a length below 2", lambda: sidestream.LLM(max_model_len=1), "max_model_len=1", "from 2 to"),
    ("memory that is no number", lambda: sidestream.LLM(gpu_memory_utilization=float("nan")), "nan", "at most 1"),
    ("no such device", lambda: sidestream.LLM(device="cuda:99"), "cuda:99", "device='cpu'"),
    ("no such adapter", lambda: sidestream.LLM(adapters={"x": "/no/such"}), "/no/such", "adapter_config.json"),
    ("a bad name", lambda: sidestream.LLM(adapters={"a b": "/no/such"}), "a b", "letters"),
    ("fields without weights", lambda: sidestream.LLM({"vocab_size": 8}), "no weights", "load_format='dummy'"),
    ("a temperature that is no number", lambda: sidestream.SamplingParams(temperature=float("nan")), "nan", "0 to 100"),
    ("no tokens", lambda: sidestream.SamplingParams(max_tokens=0), "max_tokens=0", "from 1"),
    ("a bad address", lambda: sidestream.Client("http://x"), "'http://x'", "tcp://127.0.0.1:5757"),
    ("a network without keys", lambda: sidestream.Client("tcp://10.0.0.1:5757"), "10.0.0.1", "sidestream keys curve"),
    ("an unknown pass", lambda: sidestream.LLM(disable_passes=("fuse_silu",)), "fuse_silu", "'fuse_silu_mul'?"),
)


@pytest.mark.parametrize(("call", "names", "advises"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
def test_a_wrong_call_raises_a_message_that_names_the_thing_and_the_remedy(
    call: Callable[[], Any], names: str, advises: str
) -> None:
    with pytest.raises((ValueError, TypeError, OSError, RuntimeError)) as raised:
        call()
    said = str(raised.value)
    assert names in said and advises in said
    assert "\n" not in said
