"""An EAGLE-3 head over the paged cache against its published formula over whole sequences."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.draft.config import read_eagle_config
from sidestream.graphs.draft.eagle import EagleDraft
from sidestream.graphs.draft.weights import read_eagle_tensors
from sidestream.graphs.lora import LoraShape
from sidestream.graphs.lora_stacks import fill_slot, slot_tensors
from sidestream.ops.core.kv_layout import PAGE_SIZE, kv_cache_shape
from support.eagle import Keys, dense_head, eagle_head

TARGET = LlamaConfig(320, 128, 256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


def loaded(path: Path, embedding: torch.Tensor, lora: LoraShape | None = None) -> EagleDraft:
    config = read_eagle_config(path).fitted(TARGET)
    draft = EagleDraft(config, lora)
    draft.load(read_eagle_tensors(path, config), embedding)
    return draft


class Pages:
    """The cache of some sequences, whose pages are dealt in random order."""

    def __init__(self, sequences: int, blocks: int = 2) -> None:
        self.table = torch.randperm(sequences * blocks).view(sequences, blocks).int() + 1
        shape = kv_cache_shape(sequences * blocks + 1, TARGET.num_key_value_heads, TARGET.head_dim)
        self.cache = torch.full(shape, float("nan"))

    def step(self, draft: EagleDraft, rows: list[tuple[int, torch.Tensor, torch.Tensor, int]], **more: Any) -> Any:
        """Rows of (sequence, next tokens, features, first position)."""
        positions = [torch.arange(len(tokens)) + first for _, tokens, _, first in rows]
        slots = [
            self.table[mine, place // PAGE_SIZE].long() * PAGE_SIZE + place % PAGE_SIZE
            for (mine, *_), place in zip(rows, positions, strict=True)
        ]
        counts = torch.tensor([0, *(len(tokens) for _, tokens, _, _ in rows)])
        hidden, logits = draft(
            torch.cat([tokens for _, tokens, _, _ in rows]),
            torch.cat([features for _, _, features, _ in rows]),
            torch.cat(positions),
            torch.cat(slots).int(),
            self.table[[mine for mine, *_ in rows]],
            torch.tensor([int(place[-1]) + 1 for place in positions], dtype=torch.int32),
            counts.cumsum(0).int(),
            self.cache,
            **more,
        )
        return hidden.split(counts[1:].tolist()), logits


def most_likely(draft: Any, logits: torch.Tensor) -> torch.Tensor:
    """Logits [T, V'] -> the most likely tokens [T] int64, in the target's vocabulary."""
    drafted = logits.argmax(-1)
    return drafted + draft.d2t[drafted]


@pytest.mark.parametrize("fields", [{}, {"norm_before_residual": True, "num_attention_heads": 2}])
def test_prompts_in_chunks_and_chains_are_the_formula_over_the_whole_sequence(tmp_path: Path, fields: dict) -> None:
    """Two sequences in the same steps, one in two chunks and past a page's end; then a chain of three."""
    path = eagle_head(tmp_path, TARGET, vocabulary=200, **fields)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    embedding = torch.randn(TARGET.vocab_size, TARGET.hidden_size)
    draft, pages = loaded(path, embedding), Pages(2)
    lengths = (66, 9)
    tokens = [torch.randint(0, TARGET.vocab_size, (length,)) for length in lengths]
    features = [torch.randn(length, 3 * TARGET.hidden_size) for length in lengths]
    pages.step(draft, [(0, tokens[0][:40], features[0][:40], 0)])
    hidden, logits = pages.step(draft, [(0, tokens[0][40:], features[0][40:], 40), (1, tokens[1], features[1], 0)])
    ends = torch.tensor([25, 34])
    last, drafted = [mine[-1:] for mine in hidden], most_likely(draft, logits[ends])
    keys: list[Keys] = [[], []]
    expected = [
        dense_head(tensors, config, embedding[tokens[mine]], features[mine], torch.arange(lengths[mine]), keys[mine])
        for mine in (0, 1)
    ]
    for mine in (0, 1):
        torch.testing.assert_close(hidden[mine], expected[mine][0][-len(hidden[mine]) :], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(logits[ends[mine]], expected[mine][1][-1], atol=2e-4, rtol=1e-4)
    states = [hidden[-1:] for hidden, _ in expected]
    choice = [logits[-1].argmax() for _, logits in expected]
    for step in range(3):
        named = [int(best + tensors["d2t"][best]) for best in choice]
        assert drafted.tolist() == named
        rows = [(mine, drafted[mine : mine + 1], last[mine], lengths[mine] + step) for mine in (0, 1)]
        last, logits = pages.step(draft, rows)
        drafted = most_likely(draft, logits)
        for mine in (0, 1):
            place = torch.tensor([lengths[mine] + step])
            states[mine], wanted = dense_head(
                tensors, config, embedding[named[mine]][None], states[mine], place, keys[mine]
            )
            torch.testing.assert_close(logits[mine], wanted[0], atol=2e-4, rtol=1e-4)
            choice[mine] = wanted[0].argmax()


def test_an_adapters_lora_of_the_draft_is_read_as_every_adapter_and_changes_its_rows_only(tmp_path: Path) -> None:
    """It equals a head whose weights have the update merged in."""
    path = eagle_head(tmp_path, TARGET)
    tensors = load_file(path / "model.safetensors")
    names = ("midlayer.self_attn.k_proj", "midlayer.mlp.down_proj")
    pairs = {}
    for name in names:
        rows, columns = tensors[f"{name}.weight"].shape
        pairs[name] = (torch.randn(4, columns) * 0.1, torch.randn(rows, 4) * 0.1)
    lora = tmp_path / "draft"
    lora.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "down_proj"]}
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    sides = {f"base_model.model.{name}.lora_A.weight": a for name, (a, _) in pairs.items()}
    sides |= {f"base_model.model.{name}.lora_B.weight": b for name, (_, b) in pairs.items()}
    save_file(sides, lora / "adapter_model.safetensors")

    config = read_eagle_config(path).fitted(TARGET)
    adapter = load_adapter(lora, config, max_rank=16)
    assert sorted(adapter.tensors) == sorted(names) and not adapter.differences
    shape = LoraShape(2, 16)
    embedding = torch.randn(TARGET.vocab_size, TARGET.hidden_size)
    draft = loaded(path, embedding, shape)
    fill_slot(draft, 1, slot_tensors(adapter, config, shape, torch.float32))
    merged_path = eagle_head(tmp_path / "merged", TARGET)
    merged = {
        **tensors,
        **{f"{name}.weight": tensors[f"{name}.weight"] + 2.0 * b @ a for name, (a, b) in pairs.items()},
    }
    save_file(merged, merged_path / "model.safetensors")
    tokens, features = torch.randint(0, TARGET.vocab_size, (5,)), torch.randn(5, 3 * TARGET.hidden_size)
    rows = [(0, tokens, features, 0)]
    plain = Pages(1).step(loaded(path, embedding), rows)[1]
    adapted = Pages(1).step(draft, rows, adapter_index=torch.full((5,), 1, dtype=torch.int32))[1]
    without = Pages(1).step(draft, rows)[1]
    chosen = Pages(1).step(loaded(merged_path, embedding), rows, logits_indices=torch.tensor([1, 4]))[1]
    torch.testing.assert_close(without, plain)
    torch.testing.assert_close(adapted[[1, 4]], chosen, atol=1e-4, rtol=1e-4)
    assert (adapted - plain).abs().max() > 0.01


@pytest.mark.parametrize("chain", [False, True])
def test_it_can_be_captured_and_keeps_the_paged_ops(tmp_path: Path, chain: bool) -> None:
    draft = EagleDraft(read_eagle_config(eagle_head(tmp_path, TARGET)), LoraShape(2, 16), torch.bfloat16, "meta")
    program = torch.export.export(draft, (), draft.example_inputs(chain=chain), strict=False)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert calls.count("sidestream.append_kv.default") == calls.count("sidestream.paged_attention.default") == 1
    assert calls.count("aten.linear.default") == (8 if chain else 9)  # a chain's rows need no fc
