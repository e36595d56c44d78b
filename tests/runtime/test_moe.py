"""LLM over mixtures of experts, against transformers: chunks, prefixes, preemption, samples, drafts, failed steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream import LLM, SamplingParams
from sidestream.compiler.run.bound_program import BoundProgram
from sidestream.graphs.config import LlamaConfig
from sidestream.tools import cli
from support.eagle import eagle_head
from support.tiny import TinyBase, oracle_greedy, oracle_logits, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = {"max_model_len": 192, "max_num_seqs": 4, "max_num_batched_tokens": 48, "num_kv_pages": 6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": None},
    ),
    "granite": (
        "GraniteMoe",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 64,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
        },
    ),
}


def served(base: TinyBase, **options: Any) -> LLM:
    return LLM(base.path, device="cpu", show_progress=False, **{"precision": "fp32", **SIZES, **options})


def prompts(*lengths: int) -> list[list[int]]:
    dice = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 256, (length,), generator=dice).tolist() for length in lengths]


def tokens(llm: LLM, batch: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    return [each.token_ids for output in llm.generate(batch, params, use_tqdm=False) for each in output.outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    name, fields = FAMILIES[request.param]
    return tiny_model(tmp_path_factory.mktemp(request.param), name, **fields)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    name, fields = FAMILIES["qwen3"]
    return tiny_model(tmp_path_factory.mktemp("base"), name, tokenizer=True, **fields)


@pytest.fixture(scope="module")
def llm(base: TinyBase) -> LLM:
    return served(base)


def test_greedy_tokens_are_those_of_transformers(family: TinyBase) -> None:
    """Prompts longer than a step, too few pages for all at once, and prompts from the prefix cache."""
    llm = served(family)
    batch = prompts(5, 120, 1, 70)
    batch.append([*batch[1][:100], 7, 8])
    expected = [oracle_greedy(family, None, ids, 8) for ids in batch]
    assert tokens(llm, batch) == expected
    before = llm.engine.scheduler.stats().prefix_hits
    assert tokens(llm, batch[1:2]) == expected[1:2] and llm.engine.scheduler.stats().prefix_hits > before
    llm.close()


def test_preemption_does_not_change_the_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, preemption = prompts(60, 61, 62, 63), llm.engine.scheduler.preemption
    alone = [tokens(llm, [ids])[0] for ids in batch]
    preempt, preempted = preemption.preempt, []
    monkeypatch.setattr(preemption, "preempt", lambda sequence: (preempted.append(sequence), preempt(sequence)))
    assert tokens(llm, batch) == alone and preempted, "six pages do not hold four sequences of two pages"


def test_samples_and_log_probabilities_do_not_depend_on_the_batch(llm: LLM, base: TinyBase) -> None:
    batch = prompts(9, 20, 31)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=6, n=2, logprobs=1, ignore_eos=True)
    noise = SamplingParams(temperature=1.5, max_tokens=6)
    (alone,) = llm.generate(batch[1], params, use_tqdm=False)
    together = llm.generate(batch, [noise, params, noise], use_tqdm=False)[1]
    first, second = alone.outputs
    assert first.token_ids != second.token_ids
    assert [(each.token_ids, each.logprobs) for each in together.outputs] == [
        (each.token_ids, each.logprobs) for each in alone.outputs
    ]
    expected = oracle_logits(base, None, batch[1] + first.token_ids).log_softmax(-1)[len(batch[1]) - 1 : -1]
    for token, row, found in zip(first.token_ids, expected, first.logprobs, strict=True):
        assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-3)


def test_a_failed_step_is_computed_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, commit, engine = prompts(30, 12), llm.engine.commit, llm.engine
    expected = tokens(llm, batch)
    failing = engine.scheduler.states.step + 3

    def failing_commit(result: Any) -> list[Any]:
        if result.step != failing:
            return commit(result)
        engine.scheduler.fail_step(result.step)
        return []

    monkeypatch.setattr(engine, "commit", failing_commit)
    assert tokens(llm, batch) == expected and engine.scheduler.states.step > failing


@pytest.mark.parametrize("trained", [False, True], ids=["n-grams", "trained"])
def test_drafts_do_not_change_the_tokens(llm: LLM, base: TinyBase, tmp_path: Path, trained: bool) -> None:
    batch = [[1, 2, 3, 4] * 12, *prompts(40), [9, 8, 7] * 10]
    expected = tokens(llm, batch)
    draft = {"draft": eagle_head(tmp_path, LlamaConfig.from_directory(base.path))} if trained else {}
    with served(base, speculation=3, **draft) as speculating:
        outputs = speculating.generate(batch, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.num_draft_tokens for output in outputs) > 0


def test_timed_steps_reach_experts_and_write_to_no_page_in_use(base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.Tensor] = []

    def replay(self: BoundProgram) -> Any:
        def keep(step: Any, outs: tuple[torch.Tensor, ...]) -> None:
            if step.op == "sidestream.moe_route":
                chosen.append(outs[0].clone())

        return self.run(on_step=keep)

    with served(base, speculation="auto", max_num_seqs=2) as llm:
        batch, runner = prompts(30, 70), llm.engine.runner
        before = tokens(llm, batch)
        caches = {name: value.clone() for name, value in runner.tensors.items() if name.startswith("kv_")}
        monkeypatch.setattr(BoundProgram, "replay", replay)
        monkeypatch.setattr(runner, "captures", True)
        measured = runner.measure_step_times()
        monkeypatch.undo()
        assert {each[:2] for each in measured} == {(size, rows) for size in (1, 2) for rows in (1, 2, 4, 8)}
        assert chosen and all(bool((experts >= 0).all()) for experts in chosen)
        largest = max(chosen, key=len)
        assert len(largest) == 16 and len(largest.unique()) > 4, "rows choose experts of their own"
        for name, value in caches.items():
            assert torch.equal(runner.tensors[name][:-1], value[:-1]), name
        hits = llm.engine.scheduler.stats().prefix_hits
        assert tokens(llm, batch) == before and llm.engine.scheduler.stats().prefix_hits > hits


def test_a_calibration_covers_attention(base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calibration.safetensors"
    sizes = ["--tokens", "128", "--length", "64", "--device", "cpu"]
    assert cli.main(["calibrate", str(base.path), "--round", "-o", str(path), *sizes]) == 0
    capsys.readouterr()
    rounded = tmp_path / "sidestream_rounded_int8.safetensors"
    with served(base, precision="int8", calibration=path, rounded_weights=rounded) as llm:
        assert "calibrated, with rounded weights" in llm.model.precision
        assert len(tokens(llm, prompts(20))[0]) == 8
