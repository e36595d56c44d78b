"""Adapters on experts and routers against transformers and peft: the same logits, in every layout of a file."""

import copy
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from sidestream.graphs.adapter import Adapter, load_adapter
from sidestream.graphs.adapter_config import CONFIG
from sidestream.graphs.checkpoint import checkpoint_config
from sidestream.graphs.files.adapter_file import AdapterFile
from sidestream.graphs.lora import LoraShape
from sidestream.graphs.lora_stacks import lora_shape_for, slot_tensors
from support.expert_adapters import (
    DOWN,
    GATE_UP,
    PREFIX,
    SIZES,
    merged_one_by_one,
    of_old_peft,
    on_parameters,
    one_by_one,
    read,
    sparse_blocks,
    tiny_moe,
    write,
)
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters

TOLERANCE = 1e-4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
RELEASES = ("0.17.0", "0.19.0", "0.19.1", "0.20.0", "1.0.0.post1")
ROUTERS = {"Qwen3Moe": "mlp.gate.weight", "Mixtral": "gate.weight", "GraniteMoe": "router.weight"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_moe(tmp_path_factory.mktemp("qwen"), "Qwen3Moe")


def tokens(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(320) for _ in range(count)]


def served(base: TinyBase, adapters: Sequence[Path]) -> list[torch.Tensor]:
    """Logits of a text under each adapter and the base, all in the same two steps."""
    model, _ = plain_model(base, adapters)
    slots = [*range(len(adapters)), -1]
    runner = PagedRunner(model, len(slots), padding=2)
    texts = [tokens(21, slot) for slot in slots]
    first = runner.step([Chunk(index, texts[index][:20], slot) for index, slot in enumerate(slots)])
    last = runner.step([Chunk(index, texts[index][20:], slot) for index, slot in enumerate(slots)])
    return [torch.cat(pieces) for pieces in zip(first, last, strict=True)]


def check(base: TinyBase, adapters: Sequence[Path], expected: Sequence[torch.Tensor]) -> None:
    """Each adapter gives the expected logits, which differ from the base's; the base's own are its own."""
    *got, plain = served(base, adapters)
    torch.testing.assert_close(plain, oracle_logits(base, None, tokens(21, -1)), atol=TOLERANCE, rtol=0)
    for slot, (logits, wanted) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)
        assert (wanted - oracle_logits(base, None, tokens(21, slot))).abs().max() > 0.01


def load(base: TinyBase, path: Path) -> Adapter:
    return load_adapter(path, checkpoint_config(base.path), 64)


@pytest.mark.parametrize("family", SIZES)
def test_five_adapters_and_the_base_share_every_step(tmp_path: Path, family: str) -> None:
    base = tiny_moe(tmp_path, family)
    adapters = [
        on_parameters(base, GATE_UP, DOWN, ROUTERS[family], targets=["q_proj", "o_proj"]),
        on_parameters(base, GATE_UP, rank=5, use_rslora=True),
        on_parameters(base, DOWN, rank=20, alpha_pattern={"layers.0..*experts.down_proj": 3}),
        on_parameters(base, GATE_UP, DOWN, rank_pattern={r"experts\.down_proj": 18}, alpha_pattern={"gate_up_proj": 5}),
        tiny_adapters(base, [AdapterSpec(rank=40, targets=ATTENTION)])[0],
    ]
    check(base, adapters, [oracle_logits(base, path, tokens(21, slot)) for slot, path in enumerate(adapters)])
    found = [load(base, path) for path in adapters]
    assert [(each.rank, each.expert_rank) for each in found] == [(4, 4), (0, 5), (0, 20), (0, 18), (40, 0)]
    assert not [each.differences for each in found if each.differences]


def test_merge_and_unload_gives_the_same_logits(qwen: TinyBase) -> None:
    path = on_parameters(qwen, GATE_UP, DOWN, "gate.weight", targets=["v_proj"])
    merged = TinyBase(qwen.path)
    merged.__dict__["model"] = PeftModel.from_pretrained(copy.deepcopy(qwen.model), path).merge_and_unload().eval()
    check(qwen, [path], [oracle_logits(merged, None, tokens(21, 0))])


@pytest.mark.parametrize(
    ("family", "home", "names"),
    [
        ("Qwen3Moe", None, ("gate_proj", "up_proj", "down_proj")),
        ("Mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("Mixtral", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("GraniteMoe", None, ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_a_lora_for_each_expert(tmp_path: Path, family: str, home: str | None, names: tuple[str, str, str]) -> None:
    """Gate and up have A's of their own; rsLoRA, patterns and experts without tensors."""
    base = tiny_moe(tmp_path, family)
    down = names[2]
    plain = one_by_one(base, names=names, home=home)
    varied = one_by_one(
        base,
        names=names,
        home=home,
        rank=lambda module: 9 if module.endswith(down) else 17 if ".experts.1." in module else 4,
        left_out=lambda module: ".experts.3." in module or ("layers.0." in module and module.endswith(names[1])),
        use_rslora=True,
        rank_pattern={down: 9, r"experts\.1\..*": 17},
        alpha_pattern={names[0]: 3},
    )

    def scaling(module: str, rank: int) -> float:
        return (3 if module.endswith(names[0]) else 8) / math.sqrt(rank)

    oracles = [
        merged_one_by_one(base, plain, lambda module, rank: 8 / rank),
        merged_one_by_one(base, varied, scaling),
    ]
    check(base, [plain, varied], [oracle_logits(one, None, tokens(21, slot)) for slot, one in enumerate(oracles)])
    assert not [line for line in load(base, plain).differences if "expert" in line]
    (difference,) = (line for line in load(base, varied).differences if "expert" in line)
    experts, layers = (6, 2) if family == "Qwen3Moe" else (4, 2)
    absent = 3 * layers + experts - 1
    assert f"{absent} of {3 * layers * experts} projections of experts have no tensors" in difference


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_peft_reads_a_lora_for_each_expert_the_same_way(tmp_path: Path, family: str) -> None:
    """PEFT converts it for transformers 5, with twice the rank for gate and up; saved again, it is the same adapter."""
    base = tiny_moe(tmp_path, family)
    names = ("w1", "w3", "w2") if family == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    path = one_by_one(base, names=names, home="block_sparse_moe" if family == "Mixtral" else None)
    again = path.parent / "adapter-again"
    base.adapted(path).save_pretrained(again)
    check(base, [path, again], [oracle_logits(base, path, tokens(21, slot)) for slot in range(2)])
    assert [load(base, each).expert_rank for each in (path, again)] == [4, 8]


@pytest.mark.parametrize("family", SIZES)
def test_the_layout_of_old_peft_adds_the_same_to_the_weights(tmp_path: Path, family: str) -> None:
    base = tiny_moe(tmp_path, family)
    path = on_parameters(base, GATE_UP, DOWN, rank=3)
    old = of_old_peft(base, path, None)
    check(base, [old], [oracle_logits(base, path, tokens(21, 0))])
    merged = PeftModel.from_pretrained(copy.deepcopy(base.model), path).merge_and_unload()
    adapter, config = load(base, old), checkpoint_config(base.path)
    slot = slot_tensors(adapter, config, LoraShape(1, 16, adapter.targets), torch.float32)
    blocks = zip(sparse_blocks(merged).items(), sparse_blocks(base.model).values(), strict=True)
    for (name, after), before in blocks:
        stack = f"{name.rpartition('.')[0]}.mlp.experts"
        a, b = (slot[f"{stack}.gate_up_proj.lora_{side}"] for side in "ab")
        delta = torch.cat([half @ rows for half, rows in zip(b.chunk(2, 1), a.chunk(2, 1), strict=True)], 1)
        change = after.experts.gate_up_proj - before.experts.gate_up_proj
        torch.testing.assert_close(delta, change, atol=1e-6, rtol=1e-5)
        a, b = (slot[f"{stack}.down_proj.lora_{side}"] for side in "ab")
        torch.testing.assert_close(b @ a, after.experts.down_proj - before.experts.down_proj, atol=1e-6, rtol=1e-5)


def test_the_modules_of_granite_in_transformers_4(tmp_path: Path) -> None:
    """The stacks were weights of two modules, and the router a linear with a level of its own."""
    base = tiny_moe(tmp_path, "GraniteMoe")
    path = on_parameters(base, GATE_UP, DOWN, "router.weight", alpha_pattern={r".*gate_up_proj": 3})
    renames = (
        ("experts.base_layer", "input_linear"),
        ("block_sparse_moe.experts", "block_sparse_moe.output_linear"),
        ("router.lora", "router.layer.lora"),
    )
    tensors, fields = read(path)
    for new, old in renames:
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    parameters = ["input_linear.weight", "output_linear.weight"]
    older = {**fields, "target_parameters": parameters, "target_modules": ["layer"]}
    renamed = write(base, tensors, {**older, "alpha_pattern": {"input_linear.weight": 3}})
    check(base, [of_old_peft(base, renamed, "0.17.1")], [oracle_logits(base, path, tokens(21, 0))])
    assert load(base, renamed).differences == ()


@pytest.mark.parametrize("width", [64, 128])
def test_peft_version_decides_where_both_layouts_fit(tmp_path: Path, width: int) -> None:
    """With H = 2 I gate_up_proj is square, with H = I down_proj is; a stack that is not decides for the file."""
    base = tiny_moe(tmp_path, "Mixtral", intermediate_size=width)
    square, other = (GATE_UP, DOWN) if width == 64 else (DOWN, GATE_UP)
    new = on_parameters(base, square)
    both = on_parameters(base, square, other)
    old, old_both = of_old_peft(base, new, "0.19.0"), of_old_peft(base, both, None)
    expected = [oracle_logits(base, path, tokens(21, slot)) for slot, path in enumerate((new, new, both))]
    check(base, [new, old, old_both], expected)
    tensors, fields = read(new)
    hashes = {load(base, write(base, tensors, {**fields, "peft_version": each})).content_hash for each in RELEASES}
    assert len(hashes) == 2, "the same bytes in two layouts are two adapters"
    for version in (None, "0.19.1.dev0@abc", "x" * 9999, ["0.19.1"]):
        ambiguous = of_old_peft(base, new, "")
        fields = json.loads((ambiguous / CONFIG).read_text())
        (ambiguous / CONFIG).write_text(json.dumps({**fields, "peft_version": version}))
        with pytest.raises(ValueError, match=r"fit the layouts of peft before and from 0\.19\.1 on.*save the adapter"):
            load(base, ambiguous)


def test_every_tensor_of_a_file_is_read(qwen: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [
        on_parameters(qwen, GATE_UP, DOWN, "gate.weight", targets=list(ATTENTION)),
        one_by_one(qwen, left_out=lambda module: ".experts.2." in module),
    ]
    names: list[str] = []
    tensor = AdapterFile.tensor
    monkeypatch.setattr(AdapterFile, "tensor", lambda file, name: (names.append(name), tensor(file, name))[1])
    for path in [*paths, of_old_peft(qwen, paths[0])]:
        names.clear()
        load(qwen, path)
        assert sorted(names) == sorted(read(path)[0])


def test_an_invocation_works_with_experts(qwen: TinyBase) -> None:
    path = one_by_one(qwen, alora_invocation_tokens=[5, 6])
    assert load(qwen, path).invocation == (5, 6)


def test_experts_have_a_rank_of_their_own(qwen: TinyBase) -> None:
    wide = tiny_adapters(qwen, [AdapterSpec(rank=40, targets=ATTENTION)])[0]
    first, second = load(qwen, on_parameters(qwen, DOWN, "gate.weight", rank=20)), load(qwen, wide)
    targets = (*ATTENTION, "router", "experts_down")
    assert lora_shape_for([first, second], 2) == LoraShape(2, 48, targets, (), 32)
    gate = load(qwen, one_by_one(qwen, left_out=lambda module: not module.endswith("gate_proj")))
    assert (gate.targets, gate.rank, gate.expert_rank) == (("experts_gate_up",), 0, 4)
    assert lora_shape_for([gate], 2) == LoraShape(2, 16, ("experts_gate_up",), (), 16)
    assert lora_shape_for([second], 2) == LoraShape(2, 48, ATTENTION)
    assert lora_shape_for([first], 1, 64) == LoraShape(1, 64, ("router", "experts_down"), (), 32)
    assert lora_shape_for([first], 1, 32, max_expert_rank=50) == LoraShape(1, 32, ("router", "experts_down"), (), 64)
    with pytest.raises(ValueError, match="rank 20 on experts, above max_expert_rank 16: raise max_expert_rank"):
        lora_shape_for([first], 1, max_expert_rank=16)
    small = LoraShape(1, 32, ("router", "experts_down"), (), 16)
    with pytest.raises(ValueError, match="rank 20 on experts does not fit stacks of experts of rank 16: raise"):
        slot_tensors(first, checkpoint_config(qwen.path), small)


def test_the_content_hash_covers_experts(qwen: TinyBase) -> None:
    path = on_parameters(qwen, GATE_UP, DOWN)
    first = load(qwen, path).content_hash
    tensors, fields = read(path)
    tensors[f"{PREFIX}model.layers.2.mlp.experts.base_layer.lora_B.weight"][-1, -1] += 1
    assert load(qwen, write(qwen, tensors, fields)).content_hash != first
    assert load(qwen, write(qwen, read(path)[0], fields)).content_hash == first
