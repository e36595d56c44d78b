"""Names of other trainers: the same tensors under other names, files of mlx_lm, and exporters that permute rows."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs.adapter import Adapter, load_adapter
from sidestream.graphs.adapter_config import CONFIG, AdapterError
from sidestream.graphs.adapter_names import MLX, PEFT, TensorName, tensor_name
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.model_directory import adapter_directory
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_llama

Q0 = "model.layers.0.self_attn.q_proj"
PROMPT = [3, 77, 210, 5, 148, 9]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("names"))


@pytest.fixture(scope="module")
def original(base: TinyBase) -> Path:
    """Layer 1 has another scaling, which only the right name finds."""
    spec = AdapterSpec(rank=4, targets=("k_proj", "up_proj"), alpha_pattern={"model.layers.1.self_attn.k_proj": 40})
    return tiny_adapters(base, [spec])[0]


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "adapter"))


def load(base: TinyBase, path: Path) -> Adapter:
    return load_adapter(path, LlamaConfig.from_directory(base.path), 64)


def rename(path: Path, old: str, new: str) -> None:
    tensors = load_file(path / PEFT.weights)
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path / PEFT.weights)


def configure(path: Path, **fields: Any) -> None:
    file = path / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def as_mlx(path: Path, into: Path, rank: int, scale: float, **fields: Any) -> Path:
    """The files that mlx_lm would have written for a PEFT adapter."""
    into.mkdir()
    leaves = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}
    tensors = {}
    for name, tensor in load_file(path / PEFT.weights).items():
        module, _, leaf = name.removeprefix("base_model.model.").partition(".lora_")
        tensors[f"{module}.{leaves['lora_' + leaf]}"] = tensor.T.contiguous()
    save_file(tensors, into / MLX.weights)
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "lora_parameters": parameters, "num_layers": 2, "model": "x", "iters": 600}
    (into / CONFIG).write_text(json.dumps(config | fields))
    return into


def logits(base: TinyBase, path: Path) -> torch.Tensor:
    model, _ = plain_model(base, [path])
    return PagedRunner(model, 1).step([Chunk(0, PROMPT, 0)])[0]


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        (f"base_model.model.{Q0}.lora_A.weight", (Q0, "lora_A.weight", None, Q0)),
        (f"base_model.model.{Q0}.lora_B.default.weight", (Q0, "lora_B.weight", "default", Q0)),
        (f"module.base_model.model.{Q0}.lora_B.bias", (Q0, "lora_B.bias", None, Q0)),
        (f"base_model._orig_mod.model.{Q0}.lora_A.weight", (Q0, "lora_A.weight", None, Q0)),
        (f"base_model.model.module.{Q0}.lora_B.sql.bias", (Q0, "lora_B.bias", "sql", Q0)),
        (f"base_model.model.{Q0}.lora_magnitude_vector", (Q0, "lora_magnitude_vector", None, Q0)),
        (f"base_model.model.{Q0}.lora_magnitude_vector.weight", (Q0, "lora_magnitude_vector", None, Q0)),
        (f"base_model.model.{Q0}.lora_magnitude_vector.default.weight", (Q0, "lora_magnitude_vector", "default", Q0)),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A.sql",
            ("model.embed_tokens", "lora_embedding_A", "sql", "model.embed_tokens"),
        ),
        (
            f"base_model.model.language_model.{Q0}.lora_A.weight",
            (Q0, "lora_A.weight", None, f"language_model.{Q0}"),
        ),
        ("base_model.model.language_model.lm_head.lora_A.weight",
         ("lm_head", "lora_A.weight", None, "language_model.lm_head")),
        (f"base_model.model.{Q0}.lora_A", None),
        (f"base_model.model.{Q0}.lora_A.two.names.weight", None),
        (f"{Q0}.lora_a", None),
    ],
    ids=str,
)  # fmt: skip
def test_names_are_mapped_to_peft_s(key: str, wanted: tuple[Any, ...] | None) -> None:
    assert tensor_name(key, PEFT) == (None if wanted is None else TensorName(*wanted))


def test_names_of_mlx() -> None:
    for leaf, part in (("lora_a", "lora_A.weight"), ("lora_b", "lora_B.weight"), ("m", "lora_magnitude_vector")):
        assert tensor_name(f"{Q0}.{leaf}", MLX) == TensorName(Q0, part, None, Q0)
    assert tensor_name(f"{Q0}.lora_A.weight", MLX) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", "module.base_model.model."),
        ("base_model.model.", "base_model.model.module."),
        ("base_model.model.", "base_model._orig_mod.model."),
        (".lora_A.", ".lora_A.default."),
    ],
)
def test_the_same_tensors_under_other_names(base: TinyBase, original: Path, adapter: Path, old: str, new: str) -> None:
    rename(adapter, old, new)
    if "default" in new:
        rename(adapter, ".lora_B.", ".lora_B.default.")
    assert load(base, adapter).content_hash == load(base, original).content_hash


@pytest.mark.parametrize("level", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_multimodal_save(base: TinyBase, original: Path, adapter: Path, level: str) -> None:
    """Its patterns have the level too: they match the names of the model that was trained."""
    rename(adapter, "base_model.model.model.", f"base_model.model.{level}")
    configure(adapter, alpha_pattern={f"{level}layers.1.self_attn.k_proj": 40})
    found = load(base, adapter)
    assert found.content_hash == load(base, original).content_hash
    assert found.scaling["model.layers.1.self_attn.k_proj"] == 10.0 and found.differences == ()


def test_two_names_of_one_tensor_are_refused(base: TinyBase, adapter: Path) -> None:
    tensors = load_file(adapter / PEFT.weights)
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    other = name.replace(".model.model.", ".model.model.language_model.")
    save_file(tensors | {other: tensors[name].clone()}, adapter / PEFT.weights)
    with pytest.raises(AdapterError, match=r"are both lora_A of model\.layers\.0\.self_attn\.k_proj"):
        load(base, adapter)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers.0.attn.q_proj.lora_a.weight", "torchtune's.*FullModelHFCheckpointer"),
        ("layers.0.mlp.w1.magnitude", "torchtune's.*FullModelHFCheckpointer"),
        ("decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", "Megatron's.*export_adapter_ckpt"),
        ("base_model.model.decoder.layers.0.mlp.linear_fc1.lora_A.weight", "Megatron's.*export_adapter_ckpt"),
        ("model.layers.0.self_attn.q_proj.lora_a", "mlx_lm's, but adapter_config.json is not.*adapters.safetensors"),
    ],
)
def test_names_of_other_trainers_name_their_exporter(base: TinyBase, adapter: Path, name: str, words: str) -> None:
    save_file({name: torch.zeros(4, 4)}, adapter / PEFT.weights)
    with pytest.raises(AdapterError, match=words):
        load(base, adapter)


def test_a_file_of_mlx_gives_the_logits_of_its_transposed_tensors(base: TinyBase, tmp_path: Path) -> None:
    """Of all projections; alpha / r is 32 / 8 in PEFT and the scale in mlx_lm."""
    (path,) = tiny_adapters(base, [AdapterSpec(rank=8, alpha=32)])
    mlx = as_mlx(path, tmp_path / "mlx", 8, 4.0)
    wanted, plain = oracle_logits(base, path, PROMPT), oracle_logits(base, None, PROMPT)
    found = logits(base, mlx)
    assert (found - wanted).abs().max() <= 1e-4
    assert (found - plain).abs().max() > 0.1
    assert load(base, mlx).differences == ()
    assert adapter_directory(mlx / MLX.weights) == mlx


def test_the_content_of_mlx_and_peft_is_not_confused(base: TinyBase, tmp_path: Path) -> None:
    """A square A has the same bytes and shape in both formats, and means its transpose."""
    (path,) = tiny_adapters(base, [AdapterSpec(rank=128, alpha=128, targets=("k_proj",))])
    mlx = as_mlx(path, tmp_path / "mlx", 128, 1.0)
    renamed = {f"{name.removesuffix('.weight')}": tensor for name, tensor in load_file(path / PEFT.weights).items()}
    save_file(
        {
            name.replace("lora_A", "lora_a").replace("lora_B", "lora_b").removeprefix("base_model.model."): tensor
            for name, tensor in renamed.items()
        },
        mlx / MLX.weights,
    )
    config = LlamaConfig.from_directory(base.path)
    one, other = load_adapter(path, config, 256), load_adapter(mlx, config, 256)
    k0 = "model.layers.0.self_attn.k_proj"
    assert torch.equal(one.tensors[k0][0], other.tensors[k0][0].T)
    assert one.content_hash != other.content_hash and one.source != other.source


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_parameters": {"rank": 16, "scale": 2.0}}, r"rank 4, but .* has 16 \(lora_parameters.rank"),
        ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale must be a number"),
        ({"lora_parameters": {"rank": 4, "scale": "20"}}, "lora_parameters.scale must be a number"),
        ({"lora_parameters": {"rank": 4, "scale": float("nan")}}, "lora_parameters.scale must be a number"),
        ({"lora_parameters": {"rank": True, "scale": 2.0}}, "lora_parameters.rank must be a positive integer"),
        ({"lora_parameters": None}, "lora_parameters must be an object"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0, "alpha": 16}}, "alpha = 16 scales the adapter in old releases"),
        ({"fine_tune_type": "full"}, "'full' is not an adapter: run mlx_lm.fuse"),
    ],
    ids=str,
)  # fmt: skip
def test_configs_of_mlx_that_are_refused(
    base: TinyBase, original: Path, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    path = as_mlx(original, tmp_path / "mlx", 4, 2.0, **fields)
    with pytest.raises(AdapterError, match=words):
        load(base, path)


def test_an_alpha_that_changes_nothing_and_a_missing_file(base: TinyBase, original: Path, tmp_path: Path) -> None:
    path = as_mlx(original, tmp_path / "mlx", 4, 2.0, lora_parameters={"rank": 4, "scale": 2.0, "alpha": 4})
    assert set(load(base, path).scaling.values()) == {2.0}
    (path / MLX.weights).rename(path / PEFT.weights)
    with pytest.raises(AdapterError, match=r"adapters.safetensors is missing.*mlx_lm"):
        load(base, path)
    (path / PEFT.weights).rename(path / MLX.weights)
    (path / CONFIG).unlink()
    with pytest.raises(AdapterError, match=r"has adapters.safetensors, but no adapter_config.json"):
        load(base, path)
