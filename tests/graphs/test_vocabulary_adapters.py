"""Adapters that change the embedding or the output head: logits equal peft's, whatever the kind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs import vocabulary_rows
from sidestream.graphs.adapter import Adapter, load_adapter
from sidestream.graphs.adapter_config import CONFIG, AdapterError
from sidestream.graphs.checkpoint import checkpoint_config
from sidestream.graphs.files.adapter_file import AdapterFile
from sidestream.graphs.model_directory import WEIGHTS
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_llama
from support.vocabulary import KINDS, trained

TOKENS = [5, 200, 17, 7, 17, 90, 3, 301, 44, 9, 2]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, TinyBase]:
    place = tmp_path_factory.mktemp("vocabulary")
    return {tied: tiny_llama(place / str(tied), tie_word_embeddings=tied) for tied in (False, True)}


def load(base: TinyBase, path: Path, max_rank: int = 64) -> Adapter:
    return load_adapter(path, checkpoint_config(base.path), max_rank, base=base.path)


def served(base: TinyBase, *paths: Path) -> list[torch.Tensor]:
    """Our logits of TOKENS with each adapter, all in one batch with the base alone."""
    model, _ = plain_model(base, paths)
    chunks = [Chunk(index, TOKENS, index) for index in range(len(paths))]
    return PagedRunner(model, len(paths) + 1).step([*chunks, Chunk(len(paths), TOKENS)])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_pefts(bases: dict[bool, TinyBase], tmp_path: Path, kind: str, tied: bool) -> None:
    base = bases[tied]
    path = trained(base, tmp_path / "a", **KINDS[kind])
    (plain,) = tiny_adapters(base, [AdapterSpec(rank=8)])
    want = oracle_logits(base, path, TOKENS)
    assert (want - oracle_logits(base, None, TOKENS)).abs().max() > 0.05, "the adapter does something"
    for logits, wanted in zip(
        served(base, path, plain), (want, oracle_logits(base, plain, TOKENS), oracle_logits(base, None, TOKENS)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_matrices_that_peft_saves_too_change_nothing(
    bases: dict[bool, TinyBase], tmp_path: Path, kind: str, tied: bool
) -> None:
    base = bases[tied]
    path = trained(base, tmp_path / "a", whole=True, **KINDS[kind])
    names = load_file(path / WEIGHTS)
    assert any(name.endswith((HEAD, EMBEDDING, "base_layer.weight")) for name in names)
    torch.testing.assert_close(served(base, path)[0], oracle_logits(base, path, TOKENS), atol=1e-4, rtol=0)


def edit(path: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Change fields of the config, and tensors (a callable: of the present one; None: leave it out)."""
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | fields))
    stored = load_file(path / WEIGHTS)
    for name, value in tensors.items():
        key = f"base_model.model.{name}"
        stored[key] = value(stored[key]) if callable(value) else value
    save_file({key: value.contiguous() for key, value in stored.items() if value is not None}, path / WEIGHTS)


DELTA = "model.embed_tokens.token_adapter.trainable_tokens_delta"
COPY = "model.embed_tokens.base_layer.weight"
BAD: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "token beyond the vocabulary": (
        "tokens", {"trainable_token_indices": [7, 3, 320]}, {},
        "trainable_token_indices has 320, but the base's tokens are 0 to 319: .* merge",
    ),
    "token that is a double": ("tokens", {"trainable_token_indices": [7.0, 3, 1]}, {}, "has 7.0; it must list"),
    "token that is a bool": ("tokens", {"trainable_token_indices": [True, 3, 1]}, {}, "has True; it must list"),
    "token below zero": ("tokens", {"trainable_token_indices": [-1, 3, 1]}, {}, "has -1; it must list"),
    "token twice": ("tokens", {"trainable_token_indices": [3, 3, 1]}, {}, "has a token twice"),
    "too many tokens": ("tokens", {"trainable_token_indices": [*range(2000)]}, {}, "2000 tokens; .* at most 256"),
    "no list": ("tokens", {"trainable_token_indices": {"embed_tokens": "all"}}, {}, "has another string; it must"),
    "rows for other tokens": ("tokens", {"trainable_token_indices": [7, 3]}, {}, r"shape \[3, 128\], .* has 2 tokens"),
    "tokens of no module": ("tokens", {"trainable_token_indices": {"lm_head": [7, 3, 1]}}, {}, "does not list any"),
    "tokens without rows": ("tokens", {}, {DELTA: None}, "trainable_token_indices names 'embed_tokens', but"),
    "rows that diverged": ("tokens", {}, {DELTA: lambda rows: rows / 0}, "trained rows of model.embed_tokens have NaN"),
    "rows in integers": ("tokens", {}, {DELTA: lambda rows: rows.to(torch.int8)}, "dtype 'I8', expected"),
    "matrix left out": ("saved head", {}, {HEAD: None}, "modules_to_save names 'lm_head', but the weights have no"),
    "another module saved": (
        "saved head", {"modules_to_save": ["norm"]}, {}, "modules_to_save names 'norm': only embed_tokens and lm_head"
    ),
    "all rows trained": (
        "both saved", {}, {HEAD: lambda rows: rows + 1}, r"lm_head of the base in 320 of 320 rows, .* 64: merge"
    ),
    "NaN in a matrix": (
        "both saved", {}, {HEAD: lambda rows: rows.index_fill(0, torch.tensor([3]), torch.nan)},
        "trained rows of lm_head have NaN",
    ),
    "added tokens": (
        "both saved", {}, {HEAD: lambda rows: torch.cat((rows, rows[:3]))}, "323 rows, the base's vocabulary has 320:"
    ),
    "added tokens with LoRA": (
        "embedding", {}, {COPY: lambda rows: torch.cat((rows, rows[:3]))}, "323 rows, the base's vocabulary has 320:"
    ),
    "another width": ("both saved", {}, {HEAD: torch.zeros(320, 64)}, r"\[320, 64\], but lm_head .* another base"),
    "transposed": (
        "embedding", {}, {"model.embed_tokens.lora_embedding_A": lambda a: a.T},
        r"A \[320, 4\] and B \[128, 4\], expected \[r, 320\]",
    ),
    "A for another vocabulary": (
        "embedding", {}, {"model.embed_tokens.lora_embedding_A": torch.zeros(4, 300)}, "maps 300 to 128 .* maps 320"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(bases: dict[bool, TinyBase], tmp_path: Path, name: str) -> None:
    kind, fields, tensors, words = BAD[name]
    path = trained(bases[False], tmp_path / "a", **KINDS[kind])
    assert load(bases[False], path).rank
    edit(path, fields, tensors)
    with pytest.raises(AdapterError, match=words):
        load(bases[False], path)


def test_ranks_that_trained_rows_need(bases: dict[bool, TinyBase], tmp_path: Path) -> None:
    rows = trained(bases[False], tmp_path / "a", **KINDS["tokens"] | {"trainable_token_indices": [*range(20)]})
    assert load(bases[False], rows).rank == 20
    with pytest.raises(AdapterError, match=r"20 trained tokens.*above the limit of 16: start with max_lora_rank=20"):
        load(bases[False], rows, max_rank=16)
    both = trained(bases[False], tmp_path / "b", **KINDS["embedding"])
    edit(both, {}, {COPY: lambda rows: rows.index_fill(0, torch.tensor([7, 17]), 0.25)})
    assert load(bases[False], both).rank == 6
    with pytest.raises(AdapterError, match=r"LoRA and 2 rows .* rank 6, above the limit of 4"):
        load(bases[False], both, max_rank=4)
    few = trained(bases[False], tmp_path / "c", **KINDS["both saved"], rank_pattern={"q_proj": 2})
    with pytest.raises(AdapterError, match=r"in 4 of 320 rows, .* limit of 3: start with max_lora_rank=4"):
        load(bases[False], few, max_rank=3)
    torch.testing.assert_close(
        served(bases[False], both)[0], oracle_logits(bases[False], both, TOKENS), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_copies_in_another_dtype_or_with_fewer_rows_are_the_bases(tmp_path: Path, dtype: torch.dtype) -> None:
    base = tiny_llama(tmp_path, dtype=torch.bfloat16)
    path = trained(base, tmp_path / "a", **KINDS["embedding"])
    before = load(base, path).content_hash
    edit(path, {}, {COPY: lambda rows: rows[:300].to(dtype)})
    assert load(base, path).content_hash == before and load(base, path).rank == 4


def test_a_hash_covers_changed_rows(bases: dict[bool, TinyBase], tmp_path: Path) -> None:
    path = trained(bases[False], tmp_path / "a", **KINDS["both saved"])
    before = load(bases[False], path)
    edit(path, {}, {HEAD: lambda rows: rows + 1e-3 * (torch.arange(320) == 17)[:, None]})
    after = load(bases[False], path)
    assert before.content_hash != after.content_hash and before.source != after.source
    edit(path, {"trainable_token_indices": None, "modules_to_save": None}, {})
    assert load(bases[False], path).content_hash == after.content_hash


def test_copies_that_contradict_each_other_are_refused(bases: dict[bool, TinyBase], tmp_path: Path) -> None:
    path = trained(bases[False], tmp_path / "a", **KINDS["embedding"])
    copy = load_file(path / WEIGHTS)[f"base_model.model.{COPY}"]
    one, other = copy.index_fill(0, torch.tensor(5), 0), copy.index_fill(0, torch.tensor(6), 0)
    edit(path, {}, {COPY: one, EMBEDDING: one.clone()})
    assert load(bases[False], path).rank == 5
    edit(path, {}, {EMBEDDING: other})
    with pytest.raises(AdapterError, match=r"two copies of model.embed_tokens differ .*save_embedding_layers=False"):
        load(bases[False], path)


def test_whole_matrices_are_compared_in_pieces(
    bases: dict[bool, TinyBase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trained(bases[False], tmp_path / "a", whole=True, **KINDS["both"])
    want = load(bases[False], path)
    sizes: list[int] = []
    rows = AdapterFile.rows

    def counted(file: AdapterFile, name: str, first: int, end: int) -> torch.Tensor:
        sizes.append(end - first)
        return rows(file, name, first, end)

    monkeypatch.setattr(vocabulary_rows, "PIECE", 4 * 128 * 50)
    monkeypatch.setattr(AdapterFile, "rows", counted)
    assert load(bases[False], path).content_hash == want.content_hash
    assert max(sizes) == 50 and sum(sizes) == 320 * 2
