"""A model that is named: by its directory, or by a hub id whose files lie in the local cache as huggingface_hub puts
them there.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.config_fields import ConfigError
from sidestream.graphs.model_directory import model_directory
from sidestream.runtime.text.token_bytes import letters
from sidestream.runtime.text.tokenizer import load_tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with no way to the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def put(cache: Path, name: str, *files: str) -> Path:
    """A snapshot as `hf download` leaves it: files are links to blobs."""
    home = cache / ("models--" + name.replace("/", "--"))
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    (home / "blobs").mkdir()
    for place, file in enumerate(files):
        (home / "blobs" / str(place)).write_text("{}")
        (snapshot / file).symlink_to(home / "blobs" / str(place))
    return snapshot


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert model_directory(tmp_path) == tmp_path
    assert model_directory(str(tmp_path)) == tmp_path


def test_a_hub_id_is_found_in_the_local_cache(cache: Path) -> None:
    snapshot = put(cache, "org/name", "config.json")
    assert model_directory("org/name") == snapshot


@pytest.mark.parametrize("name", ["org/name", "Qwen/Qwen2.5-7B-Instruct"])
def test_a_hub_id_that_is_not_there_says_how_to_download_it(cache: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"hf download {name} --local-dir models/"):
        model_directory(name)
    put(cache, name, "README.md")
    with pytest.raises(ConfigError, match=f"without its config.json: run `hf download {name}"):
        model_directory(name)


@pytest.mark.parametrize("name", ["nowhere", "/nowhere/at/all", "org/name/more", "../name", "org/na me"])
def test_other_names_are_no_hub_ids(cache: Path, name: str) -> None:
    assert model_directory(name) == Path(name)


def test_a_name_that_is_too_long_is_quoted_in_part() -> None:
    with pytest.raises(
        ConfigError, match=r"'x{100}...' cannot be read .File name too long.; name a directory or a hub id"
    ):
        model_directory("x" * 5000)


def test_a_cache_that_is_damaged_says_how_to_do_without(cache: Path) -> None:
    put(cache, "org/name", "config.json")
    (cache / "models--org--name" / "refs" / "main").write_bytes(b"\xff\xfe")
    with pytest.raises(
        ConfigError, match=r"'org/name' cannot be read from the local hub cache .*`hf download org/name"
    ):
        model_directory("org/name")


def test_gguf_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    for named in (tmp_path, str(tmp_path / "model.Q4_K_M.gguf")):
        with pytest.raises(ConfigError, match=r"gguf_file='model.Q4_K_M.gguf'"):
            model_directory(named)
    (tmp_path / "config.json").write_text("{}")  # both kinds of files in one directory: the other kind is taken
    assert model_directory(tmp_path) == tmp_path


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "llama").mkdir()
    assert model_directory("~/llama") == tmp_path / "llama"
    with pytest.raises(ConfigError, match="name a directory or a hub id"):
        model_directory("~nobody-of-this-name/llama")


def test_an_adapter_or_a_file_in_place_of_a_model_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "adapter_config.json").write_text('{"base_model_name_or_path": "ann/llama"}')
    with pytest.raises(
        ConfigError, match=r"is a LoRA adapter of 'ann/llama', not a model.*adapters=\{'sql': '.*/sql'\}"
    ):
        model_directory(tmp_path / "sql")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"is a file; name a directory in the Hugging Face format: {tmp_path}"):
        model_directory(str(tmp_path / "model.safetensors"))


def gguf(path: Path) -> dict[str, Any]:
    """Write a GGUF file of a random Llama in blocks of 8 bits; returns its tensors as the gguf package unpacks them."""
    gguf = pytest.importorskip("gguf", exc_type=ImportError)
    writer = gguf.GGUFWriter(str(path), "llama")
    hidden, inner, words = 64, 96, [*sorted(letters()), "th", "he"]
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // 2)
    writer.add_vocab_size(len(words) + 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<s>", "</s>", *words])
    writer.add_token_types([3, 3] + [1] * len(words))
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (len(words) + 2, hidden), "output": (len(words) + 2, hidden)}
    shapes |= {"blk.0.attn_v": (hidden // 2, hidden), "blk.0.attn_output": (hidden, hidden)}
    shapes |= {"blk.0.attn_q": (hidden, hidden), "blk.0.attn_k": (hidden // 2, hidden)}
    shapes |= {"blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden), "blk.0.ffn_down": (hidden, inner)}
    dice, kept, blocks = numpy.random.default_rng(3), {}, gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        data = gguf.quants.quantize(dice.standard_normal(shape).astype(numpy.float32), blocks)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=blocks)
        kept[name] = gguf.quants.dequantize(data, blocks)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", numpy.ones(hidden, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_the_command_that_converts_gguf_does_it(tmp_path: Path) -> None:
    """In a directory whose name a shell would take apart."""
    place = tmp_path / "it's $HOME"
    place.mkdir()
    kept = gguf(place / "m.Q8_0.gguf")
    with pytest.raises(ConfigError) as refused:
        model_directory(place)
    command = str(refused.value).split("`")[1]
    assert command.startswith('python -c "')
    script = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}; {command}'
    subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    found = load_file(tmp_path / "converted" / "model.safetensors")
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "lm_head": "output",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }.items():
        assert numpy.array_equal(found[f"{ours}.weight"].float().numpy(), kept[theirs])
    assert model_directory(tmp_path / "converted") == tmp_path / "converted"
    assert LlamaConfig.from_directory(tmp_path / "converted").num_hidden_layers == 1
    assert load_tokenizer(tmp_path / "converted") is not None
