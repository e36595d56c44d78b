"""Adapters on experts in a running engine: in `LLM`, where they share steps and slots, and over HTTP."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sidestream import LLM, OptionError, RequestError, SamplingParams
from support.expert_adapters import (
    DOWN,
    GATE_UP,
    merged_one_by_one,
    of_old_peft,
    on_parameters,
    one_by_one,
    tiny_moe,
)
from support.live_server import serving
from support.tiny import AdapterSpec, TinyBase, oracle_greedy, oracle_logits, tiny_adapters

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48, "num_kv_pages": 6}
ATTENTION = ("q_proj", "v_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_moe(tmp_path_factory.mktemp("base"), "Qwen3Moe", tokenizer=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> dict[str, Path]:
    return {
        "all": on_parameters(base, GATE_UP, DOWN, "mlp.gate.weight", targets=list(ATTENTION), alpha=80),
        "down": on_parameters(base, DOWN, rank=20, alpha=400),
        "attention": tiny_adapters(base, [AdapterSpec(rank=24, targets=ATTENTION)])[0],
    }


def started(base: TinyBase, adapters: dict[str, Path], precision: str = "fp32", **options: Any) -> LLM:
    return LLM(base.path, adapters, device="cpu", precision=precision, show_progress=False, **{**SIZES, **options})


def prompts(*lengths: int) -> list[list[int]]:
    dice = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 256, (length,), generator=dice).tolist() for length in lengths]


def test_greedy_tokens_are_those_of_transformers_and_peft(base: TinyBase, adapters: dict[str, Path]) -> None:
    """More adapters than slots, before and after the engine slept."""
    batch, chosen = prompts(5, 60, 30, 1, 20), ["all", "down", None, "attention", "all"]
    expected = [oracle_greedy(base, adapters.get(name or ""), ids, 6) for ids, name in zip(batch, chosen, strict=True)]
    for index in (0, 1):
        assert oracle_greedy(base, None, batch[index], 6) != expected[index], "the adapter makes a difference"
    with started(base, adapters, max_loras=2, enable_sleep_mode=True) as llm:
        assert (llm.model.registry.lora.rank, llm.model.registry.lora.expert_rank) == (32, 32)
        for level in (0, 2):
            if level:
                llm.sleep(level)
                llm.wake_up()
            outputs = llm.generate(batch, GREEDY, adapter=chosen, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected


def test_int8_stays_as_near_to_peft_as_with_dense_adapters(base: TinyBase, adapters: dict[str, Path]) -> None:
    """Every layout of a file in one batch, with the tolerance of `test_lower_precision_stays_near_transformers`."""
    layouts = {"each": one_by_one(base), "stacked": on_parameters(base, GATE_UP, DOWN, targets=list(ATTENTION))}
    layouts["transposed"] = of_old_peft(base, layouts["stacked"])
    oracles = {**layouts, "transposed": layouts["stacked"]}  # PEFT no longer reads its old layout
    batch, chosen = prompts(5, 60, 30, 12), ["each", "stacked", "transposed", None]
    with started(base, layouts, precision="int8") as llm:
        outputs = llm.generate(batch, replace(GREEDY, logprobs=0), adapter=chosen, use_tqdm=False)
    for ids, name, output in zip(batch, chosen, outputs, strict=True):
        (completion,) = output.outputs
        tokens = completion.token_ids
        rows = oracle_logits(base, oracles.get(name or ""), ids + tokens).log_softmax(-1)[len(ids) - 1 : -1]
        found = torch.tensor([entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)])
        own = rows[range(len(tokens)), tokens]
        assert (found - own).abs().mean() < 0.12 and (rows.amax(-1) - own).mean() < 0.12
        plain = oracle_logits(base, None, ids + tokens).log_softmax(-1)[len(ids) - 1 : -1]
        assert name is None or (rows - plain).abs().max() > 0.5, "the adapter makes a difference"


@torch.no_grad()
def activated(base: TinyBase, adapter: Path, ids: list[int], start: int) -> torch.Tensor:
    """Log-probabilities of tokens `start` to the end, where the adapter is active: its model continues the base's KV
    cache.
    """
    cache = base.model(input_ids=torch.tensor([ids[:start]]), use_cache=True).past_key_values if start else None
    found = base.adapted(adapter)(input_ids=torch.tensor([ids[start:]]), past_key_values=cache, use_cache=True)
    rows: torch.Tensor = found.logits[0].log_softmax(-1)
    return rows


def test_alora_on_experts_begins_at_its_invocation(base: TinyBase) -> None:
    always = one_by_one(base, lora_alpha=64)
    path = one_by_one(base, lora_alpha=64, alora_invocation_tokens=[7, 8, 9])
    (before,) = prompts(40)
    with started(base, {"each": path}) as llm:
        for ids, start in (([*before, 7, 8, 9, *before[:9]], 40), ([7, 8, 9, *before], 0), (before, None)):
            (output,) = llm.generate(ids, replace(GREEDY, logprobs=0), adapter="each", use_tqdm=False)
            (completion,) = output.outputs
            tokens = completion.token_ids
            entries = zip(completion.logprobs, tokens, strict=True)
            found = torch.tensor([entry[token].logprob for entry, token in entries])
            if start is None:
                rows = oracle_logits(base, None, ids + tokens).log_softmax(-1)
            else:
                rows = activated(base, always, ids + tokens, start)
            chosen = rows[-len(tokens) - 1 : -1]
            assert chosen.argmax(-1).tolist() == tokens
            torch.testing.assert_close(found, chosen.amax(-1), atol=1e-4, rtol=0)
            if start == 40:
                plain = oracle_logits(base, always, ids + tokens).log_softmax(-1)[-len(tokens) - 1 : -1]
                assert (plain.amax(-1) - found).abs().max() > 1e-3, "tokens before the invocation have no adapter"


def test_stacks_limit_the_adapters_that_are_added(base: TinyBase, adapters: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match=r"adapter 'down': .* rank 20 on experts, above max_expert_rank 16"):
        started(base, {"down": adapters["down"]}, max_expert_rank=16)
    ids = prompts(9)[0]
    with started(base, {}, max_loras=1, max_lora_rank=8, max_expert_rank=32) as llm:
        llm.add_adapter("down", adapters["down"])
        (output,) = llm.generate(ids, GREEDY, adapter="down", use_tqdm=False)
        assert output.outputs[0].token_ids == oracle_greedy(base, adapters["down"], ids, 6)
        with pytest.raises(RequestError, match="rank 24 on q_proj, v_proj does not fit stacks of rank 16"):
            llm.add_adapter("attention", adapters["attention"])


def test_a_server_loads_and_serves_an_adapter_with_a_lora_for_each_expert(base: TinyBase) -> None:
    path, ids = one_by_one(base, lora_alpha=64), prompts(12)[0]
    sizes = ["--max-model-len", "128", "--max-num-seqs", "2", "--max-loras", "1", "--max-lora-rank", "8"]
    with (
        serving(str(base.path), *sizes, "--max-expert-rank", "4", "--adapter-root", str(path.parent)) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "each", "lora_path": str(path)})
        assert loaded.status_code == 200, loaded.text
        body = {"prompt": ids, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        answers = [client.post("/v1/completions", json={**body, "model": name}).json() for name in ("each", "base")]
        (card,) = (each for each in client.get("/v1/models").json()["data"] if each["id"] == "each")
    assert card["rank"] == 4
    found = [answer["choices"][0]["token_ids"] for answer in answers]
    merged = merged_one_by_one(base, path, lambda module, rank: 64 / rank)
    assert found == [oracle_greedy(each, None, ids, 6) for each in (merged, base)] and found[0] != found[1]
