"""Odd configs and files of adapters, each with its outcome: served with a scaling, or refused with words that name what
is wrong. No remedy may give another model than the one that was trained.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.adapter_config import CONFIG, AdapterError
from sidestream.graphs.adapter_names import MLX, PEFT
from sidestream.graphs.config import LlamaConfig
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

Q0 = "model.layers.0.self_attn.q_proj"
PEFT_A = f"base_model.model.{Q0}.lora_A.weight"
MERGE = "merge the adapter into its base"
NO_MERGE = "cannot be merged into a model: serve it with peft"
DROP = "dropped"
"""The value of a field that the config does not have."""

# fields of a PEFT config (rank 4, alpha 8 on q_proj) -> scaling of layer 0, or the words of the refusal
PEFT_CONFIGS: list[tuple[dict[str, Any], float | str]] = [
    ({"lora_alpha": 0}, 0.0),
    ({"lora_alpha": -8}, -2.0),
    ({"lora_alpha": 1}, 0.25),
    ({"lora_alpha": 8.5}, 2.125),
    ({"lora_alpha": True}, "lora_alpha must be a number"),
    ({"lora_alpha": [8]}, "lora_alpha must be a number"),
    ({"lora_alpha": DROP}, 2.0),
    ({"r": DROP, "rank_pattern": {"q_proj": 4}}, 2.0),
    ({"r": DROP}, "rank 4, but adapter_config.json has 8"),
    ({"r": 4.0}, "r must be a positive integer"),
    ({"r": -4}, "r must be a positive integer"),
    ({"r": True}, "r must be a positive integer"),
    ({"r": 2**31}, "r must be a positive integer"),
    ({"use_rslora": True}, 4.0),
    ({"use_rslora": True, "alpha_pattern": {"q_proj": 3}}, 1.5),
    ({"use_rslora": None}, 2.0),
    ({"use_rslora": 1}, "use_rslora must be of type bool"),
    ({"alpha_pattern": {"layers.0.self_attn.q_proj": 16}}, 4.0),
    ({"alpha_pattern": {"layers.1.self_attn.q_proj": 16}}, 2.0),
    ({"alpha_pattern": {r".*\.0\..*": 16}}, 4.0),
    ({"alpha_pattern": {"proj": 16}}, 2.0),
    ({"alpha_pattern": {}}, 2.0),
    ({"alpha_pattern": None}, 2.0),
    ({"alpha_pattern": {"q_proj": "16"}}, "alpha_pattern"),
    ({"rank_pattern": {"q_proj": 4, "v_proj": 999}}, 2.0),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
    ({"target_modules": DROP}, 2.0),
    ({"target_modules": "all-linear"}, 2.0),
    ({"target_modules": []}, 2.0),
    ({"target_modules": {"q_proj": 1}}, "target_modules must be a string or a list"),
    ({"exclude_modules": "q_proj"}, 2.0),
    ({"layers_to_transform": [-1]}, 2.0),
    ({"layers_to_transform": [True]}, "layers_to_transform must be layer numbers"),
    ({"bias": None}, "bias = None must be one of"),
    ({"bias": True}, "bias = True must be one of"),
    ({"init_lora_weights": None}, 2.0),
    ({"init_lora_weights": "eva"}, 2.0),
    ({"init_lora_weights": "true"}, "init_lora_weights = 'true' is not supported"),
    ({"init_lora_weights": "pissa_niter_16"}, "merge it there, into the changed base"),
    ({"init_lora_weights": "lora_ga"}, "merge it there, into the changed base"),
    ({"task_type": None}, 2.0),
    ({"task_type": "causal_lm"}, "task_type = another string is not supported"),
    ({"peft_type": "lora"}, "peft_type another string is not supported"),
    ({"peft_type": "LOHA"}, MERGE),
    ({"peft_type": "DELORA"}, MERGE),
    ({"peft_type": "XLORA"}, NO_MERGE),
    ({"peft_type": "PREFIX_TUNING"}, NO_MERGE),
    ({"peft_type": "SHADOW"}, NO_MERGE),
    ({"peft_type": ["LORA"]}, "peft_type a list is not supported"),
    ({"peft_type": DROP}, "peft_type None is not supported"),
    ({"auto_mapping": {"base_model_class": "X", "parent_library": "y"}}, 2.0),
    ({"base_model_name_or_path": "/nowhere", "revision": "main", "inference_mode": False}, 2.0),
    ({"loftq_config": {"loftq_bits": 4}, "lora_dropout": 1.0}, 2.0),
    ({"lora_ga_config": None, "arrow_config": None, "megatron_config": None, "modules_to_save": []}, 2.0),
    ({"new_field": 0}, 2.0),
    ({"new_field": 1}, "unknown field 'new_field' may change"),
    ({"lora_parameters": {"rank": 4, "scale": 2.0}}, "unknown field 'lora_parameters' may change"),
]

# name of layer 0's A in a PEFT file -> scaling, or the words of the refusal
KEYS: list[tuple[str, float | str]] = [
    (f"{Q0}.lora_A.weight", 2.0),
    (f"module.module.base_model.model.{Q0}.lora_A.weight", 2.0),
    (f"base_model.model.base_model.model.module.{Q0}.lora_A.weight", 2.0),
    (f"base_model.model.{Q0}.lora_A.weight.weight", "adapters with different names"),
    (f"base_model.model.{Q0}.lora_A.sql.weight", "adapters with different names"),
    (f"base_model.model.{Q0}.lora_A.bias", "is not LoRA A or B"),
    (f"base_model.model.{Q0}.lora_A", "is not LoRA A or B"),
    (f"base_model.model.{Q0}.lora_C.weight", "is not LoRA A or B"),
    (f"base_model.model.{Q0}.base_layer.weight", "is not LoRA A or B"),
    (f"base_model.model.{Q0}.lora_a", "mlx_lm's, but adapter_config.json is not mlx_lm's"),
    (f"base_model.model.{Q0}.lora_a.weight", "torchtune's"),
    ("base_model.model.decoder.layers.0.self_attention.linear_qkv.lora_A.weight", "Megatron's"),
    ("base_model.model.language_model.vision.layers.0.q_proj.lora_A.weight", "is not LoRA A or B"),
    ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "is not LoRA A or B|adapts q_proj"),
    ("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight", "is for layer 2 of 2"),
    ("base_model.model.model.layers.0.self_attn.W_pack.lora_A.weight", "is not LoRA A or B"),
    (".", "is not LoRA A or B"),
    ("lora_A.weight", "is not LoRA A or B"),
    ("x" * 500 + ".lora_A.weight", r"a name of 514 characters"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def original(base: TinyBase) -> Path:
    return tiny_adapters(base, [AdapterSpec(rank=4, alpha=8, targets=("q_proj",))])[0]


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "adapter"))


def check(base: TinyBase, path: Path, wanted: float | str) -> None:
    config = LlamaConfig.from_directory(base.path)
    if isinstance(wanted, str):
        with pytest.raises(AdapterError, match=wanted) as caught:
            load_adapter(path, config, 256)
        message = str(caught.value)
        assert len(message) < 600 and "remove the" not in message and "delete" not in message
    else:
        assert load_adapter(path, config, 256).scaling[Q0] == wanted


@pytest.mark.parametrize(("fields", "wanted"), PEFT_CONFIGS, ids=lambda value: str(value)[:60])
def test_odd_configs(base: TinyBase, adapter: Path, fields: dict[str, Any], wanted: float | str) -> None:
    config = json.loads((adapter / CONFIG).read_text()) | fields
    (adapter / CONFIG).write_text(json.dumps({name: value for name, value in config.items() if value is not DROP}))
    check(base, adapter, wanted)


@pytest.mark.parametrize(("key", "wanted"), KEYS, ids=lambda value: str(value)[:60])
def test_odd_names(base: TinyBase, adapter: Path, key: str, wanted: float | str) -> None:
    tensors = load_file(adapter / PEFT.weights)
    save_file({key if name == PEFT_A else name: tensor for name, tensor in tensors.items()}, adapter / PEFT.weights)
    check(base, adapter, wanted)


@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        (((4, 128), (256, 4)), r"maps 4 to 4 features|expected \[r, 128\]"),  # PEFT's own, not transposed
        (((128, 4), (256, 4)), r"expected \[r, 128\] and \[256, r\]: .*mlx_lm"),
        (((128, 4), (4, 128)), "maps 128 to 128 features"),
        (((128, 0), (0, 256)), "rank 0, but adapter_config.json has 4"),
        (((128, 4, 1), (4, 256)), r"expected \[r, 128\]"),
        (((128, 4), (4, 256)), 2.0),
    ],
)
def test_odd_shapes_of_mlx(base: TinyBase, tmp_path: Path, shapes: tuple[Any, Any], wanted: float | str) -> None:
    path = tmp_path / "mlx"
    path.mkdir()
    save_file({f"{Q0}.lora_a": torch.ones(shapes[0]), f"{Q0}.lora_b": torch.ones(shapes[1])}, path / MLX.weights)
    (path / CONFIG).write_text(json.dumps({"lora_parameters": {"rank": 4, "scale": 2}}))
    check(base, path, wanted)
