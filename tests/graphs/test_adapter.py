"""PEFT adapters: what is read from good ones, and each kind of bad one refused by name with a remedy."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs.adapter import Adapter, load_adapter
from sidestream.graphs.adapter_config import MAX_RANK, AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.ops.lora.expand import MAX_RANK as EXPAND_RANK
from sidestream.runtime.adapters.describer import AdapterDescriber
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

Q0 = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{Q0}.lora_{{}}.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def adapter(base: TinyBase) -> Path:
    return tiny_adapters(base, [AdapterSpec(rank=8, targets=("q_proj", "down_proj"))])[0]


def load(base: TinyBase, path: Path, max_rank: int = 64, **options: Any) -> Adapter:
    return load_adapter(path, LlamaConfig.from_directory(base.path), max_rank, **options)


def configure(path: Path, **fields: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors."""
    tensors = {**load_file(path / "adapter_model.safetensors"), **changes}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "adapter_model.safetensors"
    )


def refused(base: TinyBase, path: Path, *named: str, **options: Any) -> None:
    with pytest.raises(AdapterError) as caught:
        load(base, path, **options)
    message = str(caught.value)
    for text in named:
        assert text in message, message
    assert ": " in message  # what, then what to do
    assert str(path) not in message or "does not exist" in message


def test_a_good_adapter(base: TinyBase, adapter: Path) -> None:
    loaded = load(base, adapter)
    assert (loaded.rank, loaded.targets, loaded.differences) == (8, ("q_proj", "down_proj"), ())
    assert set(loaded.scaling.values()) == {2.0}
    assert list(loaded.tensors) == [
        Q0,
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    ]
    a, b = loaded.tensors[Q0]
    assert (tuple(a.shape), tuple(b.shape)) == ((8, 128), (256, 8))
    stored = load_file(adapter / "adapter_model.safetensors")
    assert torch.equal(a, stored[KEY.format("A")])
    assert torch.equal(b, stored[KEY.format("B")])
    assert loaded.nbytes == sum(tensor.nbytes for tensor in stored.values())


def test_ranks_and_scalings_are_peft_s_own(base: TinyBase) -> None:
    ranks = {r"layers\.1\..*": 20, "q_proj": 4}
    alphas = {"layers.0.mlp.up_proj": 3, ".*_proj": 5}
    spec = AdapterSpec(rank=6, alpha=9, use_rslora=True, rank_pattern=ranks, alpha_pattern=alphas, targets="all-linear")
    path = tiny_adapters(base, [spec])[0]
    loaded = load(base, path)
    theirs = {
        name.removeprefix("base_model.model."): module
        for name, module in base.adapted(path).named_modules()
        if hasattr(module, "lora_A")
    }
    assert loaded.scaling.keys() == theirs.keys()
    for name, module in theirs.items():
        assert loaded.scaling[name] == pytest.approx(module.scaling["default"], rel=1e-12), name
        assert loaded.tensors[name][0].shape[0] == module.r["default"]
    assert loaded.rank == 20
    assert loaded.scaling[f"{Q0}"] == pytest.approx(5 / math.sqrt(4))


@pytest.mark.parametrize(
    "extra",
    [
        {"exclude_modules": ["q_proj"]},
        {"layers_to_transform": 1},
        {"layers_to_transform": [0], "layers_pattern": "layers"},
        {"bias": "lora_only"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": False},
        {"lora_dropout": 0.5},
    ],
    ids=str,
)
def test_plain_variants_load_without_differences(base: TinyBase, extra: dict[str, Any]) -> None:
    loaded = load(base, tiny_adapters(base, [AdapterSpec(targets=("q_proj", "v_proj"), extra=extra)])[0])
    assert loaded.differences == ()


def test_target_modules_as_a_regular_expression(base: TinyBase) -> None:
    loaded = load(base, tiny_adapters(base, [AdapterSpec(targets=r".*layers\.1\..*(up|gate)_proj")])[0])
    assert list(loaded.tensors) == ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    assert loaded.differences == ()


def test_the_tensors_decide_and_differences_are_named(
    base: TinyBase, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(adapter, target_modules=["q_proj", "v_proj"])
    loaded = load(base, adapter)
    assert loaded.targets == ("q_proj", "down_proj")
    lacking, beyond = loaded.differences
    assert "model.layers.0.self_attn.v_proj" in lacking
    assert "model.layers.0.mlp.down_proj" in beyond
    assert lacking in caplog.text


def test_content_hash_covers_values_and_scaling_only(base: TinyBase, adapter: Path) -> None:
    first = load(base, adapter).content_hash
    configure(adapter, base_model_name_or_path="elsewhere", lora_dropout=0.1)
    assert load(base, adapter).content_hash == first
    configure(adapter, lora_alpha=17)
    scaled = load(base, adapter).content_hash
    edit(adapter, **{KEY.format("B"): torch.randn(256, 8)})
    assert len({first, scaled, load(base, adapter).content_hash}) == 3


def test_an_invocation_is_part_of_the_content(base: TinyBase, adapter: Path) -> None:
    plain = load(base, adapter)
    configure(adapter, alora_invocation_tokens=[])  # plain LoRA for PEFT, too
    empty = load(base, adapter)
    assert (empty.invocation, empty.content_hash, empty.source) == ((), plain.content_hash, plain.source)
    configure(adapter, alora_invocation_tokens=[5, 319])
    first = load(base, adapter)
    configure(adapter, alora_invocation_tokens=[319, 5])
    second = load(base, adapter)
    assert (first.invocation, second.invocation) == ((5, 319), (319, 5))
    assert len({each.content_hash for each in (plain, first, second)}) == 3
    assert len({each.source for each in (plain, first, second)}) == 3
    assert AdapterDescriber()(adapter, LlamaConfig.from_directory(base.path), 64, False, None).invocation == (319, 5)


def test_a_loaded_adapter_survives_its_file(base: TinyBase, adapter: Path) -> None:
    loaded = load(base, adapter)
    before = loaded.tensors[Q0][0].clone()
    with open(adapter / "adapter_model.safetensors", "r+b") as file:  # overwritten in place, as a trainer does
        size = len(file.read())
        file.seek(0)
        file.write(b"\xff" * size)
        file.truncate(size // 2)
    assert torch.equal(loaded.tensors[Q0][0], before)


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "unknown field"),
    ({"peft_type": "VERA"}, "peft_type 'VERA'"),
    ({"peft_type": None}, "peft_type None"),
    ({"use_dora": True}, "use_dora"),
    ({"lora_bias": True}, "lora_bias"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"modules_to_save": ["lm_head", "input_layernorm"]}, "modules_to_save names 'input_layernorm'"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"megatron_config": {"a": 1}}, "megatron_config"),
    ({"target_parameters": ["x"]}, "target_parameters"),
    ({"use_qalora": True}, "use_qalora"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"alora_invocation_tokens": [5] * 65}, "alora_invocation_tokens has 65 token ids, more than 64: train"),
    ({"alora_invocation_tokens": [5, -1]}, "alora_invocation_tokens must be token ids of the base, from 0 on, not -1"),
    ({"alora_invocation_tokens": [True]}, "from 0 on, not True"),
    ({"alora_invocation_tokens": [1.0]}, "from 0 on, not 1.0"),
    ({"alora_invocation_tokens": ["<|x|>"]}, "from 0 on, not another string"),
    ({"alora_invocation_tokens": [10**30]}, "from 0 on, not a larger integer"),
    ({"alora_invocation_tokens": {"1": 2}}, "alora_invocation_tokens must be a list of token ids, not an object"),
    ({"alora_invocation_tokens": 7}, "alora_invocation_tokens must be a list of token ids, not 7"),
    (
        {"alora_invocation_tokens": [319, 320]},
        "alora_invocation_tokens has token 320, but the base has tokens 0 to 319",
    ),
    ({"arrow_config": {"top_k": 3}}, "arrow_config"),
    ({"velora_config": {"scale": 1.0}}, "velora_config"),
    ({"monteclora_config": {"num_samples": 1}}, "monteclora_config"),
    ({"kasa_config": {"x": 1}}, "kasa_config"),
    ({"bias": "most"}, "bias = "),
    ({"use_dora": True, "lora_bias": True}, "use_dora and lora_bias"),
    ({"init_lora_weights": "pissa"}, "'pissa'"),
    ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4'"),
    ({"init_lora_weights": "olora"}, "'olora'"),
    ({"init_lora_weights": "corda"}, "'corda'"),
    ({"init_lora_weights": "loftq"}, "'loftq'"),
    ({"init_lora_weights": "lora_ga"}, "'lora_ga'"),
    ({"init_lora_weights": "mica"}, "'mica'"),
    ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
    ({"use_shiny_lora": True}, "use_shiny_lora"),
    ({"r": 0}, "r must be"),
    ({"r": "8"}, "r must be"),
    ({"lora_alpha": float("nan")}, "lora_alpha"),
    ({"lora_alpha": float("inf")}, "lora_alpha"),
    ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"lora_alpha": "16"}, "lora_alpha"),
    ({"use_rslora": "yes"}, "use_rslora"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern['q_proj']"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
    ({"rank_pattern": {"(": 8}}, "rank_pattern"),
    ({"alpha_pattern": {"(?!a)b": 8}}, "alpha_pattern"),
    ({"rank_pattern": {f"x{index}": 8 for index in range(2000)}}, "rank_pattern has 2000 patterns"),
    ({"lora_alpha": 1e8}, "lora_alpha"),
    ({"target_modules": ["q_proj"] * 5000}, "5000 entries"),
    ({"target_modules": "("}, "target_modules"),
    ({"target_modules": [1]}, "target_modules"),
    ({"exclude_modules": {"q": 1}}, "exclude_modules"),
    ({"layers_to_transform": ["0"]}, "layers_to_transform"),
    ({"r": 16}, "rank 8, but adapter_config.json has 16"),
    ({"rank_pattern": {"q_proj": 4}}, "rank 8, but adapter_config.json has 4"),
]


@pytest.mark.parametrize(
    ("fields", "named"), FIELDS, ids=[f"{next(iter(fields))}-{index}" for index, (fields, _) in enumerate(FIELDS)]
)
def test_fields_that_mean_something_else_are_refused(
    base: TinyBase, adapter: Path, fields: dict[str, Any], named: str
) -> None:
    configure(adapter, **fields)
    refused(base, adapter, named)


def test_lenient_lets_unknown_fields_pass_but_no_known_ones(base: TinyBase, adapter: Path) -> None:
    configure(adapter, use_shiny_lora=True)
    assert load(base, adapter, lenient=True).rank == 8
    configure(adapter, use_dora=True)
    refused(base, adapter, "use_dora", lenient=True)


def test_unknown_fields_at_an_empty_default_pass(base: TinyBase, adapter: Path) -> None:
    configure(
        adapter, use_shiny_lora=False, shiny_config=None, shiny_list=[], runtime_config={"ephemeral_gpu_offload": True}
    )
    assert load(base, adapter).rank == 8


TENSORS: list[tuple[dict[str, torch.Tensor | None], tuple[str, ...]]] = [
    ({KEY.format("B"): None}, (Q0, "lora_A but no lora_B")),
    ({KEY.format("A"): None}, (Q0, "lora_B but no lora_A")),
    ({KEY.format("A"): torch.zeros(8, 64)}, (Q0, "another base")),
    ({KEY.format("B"): torch.zeros(512, 8)}, (Q0, "another base")),
    ({KEY.format("A"): torch.zeros(4, 128)}, (Q0, "[4, 128]", "[256, 8]")),
    ({KEY.format("A"): torch.zeros(8)}, (Q0, "[8]")),
    ({KEY.format("A"): torch.full((8, 128), math.nan)}, (KEY.format("A"), "NaN")),
    ({KEY.format("B"): torch.full((256, 8), math.inf)}, (KEY.format("B"), "infinity")),
    ({KEY.format("B"): torch.full((256, 8), 1e30)}, (KEY.format("B"), "magnitudes of 65536 or more")),
    ({KEY.format("A"): torch.zeros(8, 128, dtype=torch.int8)}, (KEY.format("A"), "I8")),
    ({f"base_model.model.{Q0}.lora_A.default.weight": torch.zeros(8, 128)}, ("both lora_A", Q0)),
    ({f"{Q0}.lora_A.weight": torch.zeros(8, 128)}, ("both lora_A", Q0)),
    ({f"base_model.model.{Q0}.lora_magnitude_vector": torch.zeros(256)}, ("use_dora = False", "lora_magnitude_vector")),
    ({f"base_model.model.{Q0}.lora_B.bias": torch.zeros(256)}, ("lora_bias = False", "lora_B.bias")),
    ({"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 128)}, ("lm_head has lora_A but no lora_B",)),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 320)}, ("embed_tokens has lora_A",)),
    ({"base_model.model.lm_head.weight": torch.zeros(320, 128)}, ("random weights", "load_format='dummy'")),
    ({"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(8, 128)}, ("layer 7", "2")),
    ({"base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight": torch.zeros(8, 128)}, ("qkv_proj",)),
    ({"something": torch.zeros(1)}, ("'something'",)),
    ({f"base_model.model.{Q0}.lora_magnitude_vector": torch.ones(255)}, (Q0, "[255], expected [256]")),
    ({f"base_model.model.{Q0}.lora_B.bias": torch.ones(1, 256)}, (Q0, "lora_B.bias [1, 256], expected [256]")),
    ({f"base_model.model.{Q0}.base_layer.bias": torch.ones(256)}, (f"{Q0}.base_layer.bias", "the base has none there")),
    (
        {
            f"base_model.model.{Q0}.lora_magnitude_vector": torch.ones(256),
            f"base_model.model.{Q0}.lora_B.bias": torch.ones(256),
        },
        (Q0, "PEFT does not define together"),
    ),
    ({"base_model.model.lm_head.lora_magnitude_vector": torch.ones(320)}, ("lm_head", "without magnitudes (DoRA)")),
]


@pytest.mark.parametrize(
    ("changes", "named"), TENSORS, ids=[f"{named[-1][:20]}-{index}" for index, (_, named) in enumerate(TENSORS)]
)
def test_tensors_that_cannot_be_served_are_refused(
    base: TinyBase, adapter: Path, changes: dict[str, torch.Tensor | None], named: tuple[str, ...]
) -> None:
    edit(adapter, **changes)
    refused(base, adapter, *named)


def test_no_tensors(base: TinyBase, adapter: Path) -> None:
    save_file({}, adapter / "adapter_model.safetensors")
    refused(base, adapter, "no LoRA tensors")


def test_rank_above_the_limit(base: TinyBase, adapter: Path) -> None:
    refused(base, adapter, "rank 8", "max_lora_rank=8", max_rank=4)


def test_the_highest_rank_is_the_kernels(base: TinyBase) -> None:
    """A rank that no option allows is not answered with an option."""
    assert MAX_RANK == EXPAND_RANK
    (path,) = tiny_adapters(base, [AdapterSpec(rank=272, targets=("q_proj",))])
    refused(base, path, "rank 272", "at most 256", "merge", max_rank=1024)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (AdapterSpec(extra={"use_dora": True}), "self_attn.q_proj"),
        (AdapterSpec(targets=("q_proj", "lm_head")), "lm_head"),
    ],
)
def test_an_invocation_goes_with_plain_lora_only(base: TinyBase, spec: AdapterSpec, named: str) -> None:
    (path,) = tiny_adapters(base, [spec])
    configure(path, alora_invocation_tokens=[5])
    refused(base, path, "alora_invocation_tokens can only", named)


def test_dora_from_peft_itself(base: TinyBase) -> None:
    (path,) = tiny_adapters(base, [AdapterSpec(extra={"use_dora": True})])
    assert load(base, path).kinds == ("dora",)


def test_adapter_of_a_larger_model(base: TinyBase, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path, hidden_size=256)
    refused(base, tiny_adapters(other, [AdapterSpec()])[0], "another base")


def test_only_safetensors(base: TinyBase, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refused(base, adapter, "adapter_model.bin", "safe_serialization=True")


@pytest.mark.parametrize("keep", [0, 50, -4])
def test_truncated_weights(base: TinyBase, adapter: Path, keep: int) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(base, adapter, "adapter_model.safetensors", "truncated")


def test_missing_files(base: TinyBase, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="does not exist"):
        load(base, tmp_path / "nowhere")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is missing"):
        load(base, adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"adapter_config\.json does not exist"):
        load(base, adapter)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"[" * 50000], ids=["empty", "unclosed", "list", "not-utf8", "deep"]
)
def test_broken_config(base: TinyBase, adapter: Path, content: bytes) -> None:
    (adapter / "adapter_config.json").write_bytes(content)
    refused(base, adapter, "adapter_config.json")
