"""Cascade attention in an engine: which engines have programs for it, their number, and answers with and without."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sidestream
from sidestream.compiler import pipeline
from sidestream.compiler.options import CompileOptions
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.engine.options import EngineOptions
from sidestream.runtime.scheduler.cascade import shared_prefixes
from sidestream.runtime.worker import model_loader
from sidestream.runtime.worker.buckets import Buckets
from sidestream.runtime.worker.cascade_attention import cascade_limits
from sidestream.tools.bench.random_model import write_model

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_8B = MODEL | {"num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("engine", "compiler", "fields", "expected"),
    [
        ({}, {}, {}, (32, 1375)),
        ({}, {"precision": "fp8"}, {}, (32, 1375)),
        ({}, {"tensor_parallel": 4}, {}, (32, 5500)),
        ({"cascade_attention": False}, {}, {}, (0, 0)),
        ({"enable_prefix_caching": False}, {}, {}, (0, 0)),
        ({"speculation": "auto"}, {}, {}, (0, 0)),
        ({}, {"exact": True}, {}, (0, 0)),
        ({}, {"size_independent": True}, {}, (0, 0)),
        ({}, {"precision": "bf16"}, {}, (0, 0)),
        ({}, {}, {"head_dim": 64}, (0, 0)),
        ({}, {}, {"num_attention_heads": 128}, (0, 0)),
        ({}, {}, {"sliding_window": 128, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}, (0, 0)),
    ],
)
def test_engines_with_programs_for_it(
    engine: dict[str, Any], compiler: dict[str, Any], fields: dict[str, Any], expected: tuple[int, int]
) -> None:
    config = LlamaConfig.from_dict(LLAMA_8B | fields)
    assert cascade_limits(config, EngineOptions(**engine), CompileOptions(**compiler), 256) == expected
    assert cascade_limits(config, EngineOptions(**engine), CompileOptions(**compiler), 127) == (0, 0)


def test_few_buckets_are_added() -> None:
    plain, more = Buckets(256, 8192, 100, 8, True), Buckets(256, 8192, 100, 8, True, cascade=True)
    added = [bucket for bucket in more.captured_buckets() if bucket.cascade]
    assert [bucket.sequences for bucket in added] == [size for size in (256, 224, 192, 160, 128) for _ in range(2)]
    assert [bucket for bucket in more.captured_buckets() if not bucket.cascade] == plain.captured_buckets()
    assert more.built_at_start() == [*more.warm_up_buckets(), *more.captured_buckets(), *more.later_buckets()]
    few = Buckets(127, 8192, 100, 8, True)
    assert replace(few, cascade=True).captured_buckets() == few.captured_buckets()
    assert Buckets(130, 8192, 100, 8, True, cascade=True).cascade_sizes() == [128, 130]


@pytest.mark.parametrize("lora", [True, False])
def test_each_step_has_a_captured_bucket(lora: bool) -> None:
    buckets = Buckets(200, 8192, 100, 8, True, cascade=True)
    captured = set(buckets.captured_buckets())
    for sequences in range(128, 201):
        for cascade in (True, False):
            plan: Any = SimpleNamespace(
                num_tokens=sequences,
                logits_indices=range(sequences),
                uses_lora=lora,
                verifies=False,
                decode=True,
                cascade=cascade,
            )
            bucket = buckets.pick(plan)
            assert bucket in captured and bucket.cascade == cascade and bucket.lora == lora
            assert sequences <= bucket.sequences < sequences + 32


def test_the_same_answers_with_and_without(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with shared prefixes run from the plans' marks: with adapters, preemption, chunks of prompts and log-
    probabilities; on a CPU to the bit.
    """
    monkeypatch.setattr(pipeline, "SAME_VALUES", pipeline.SAME_VALUES | {"share_prefix"})
    monkeypatch.setattr(shared_prefixes, "CASCADE_SEQUENCES", 4)
    adapters = write_model(tmp_path, MODEL, 2, 8)
    source = random.Random(0)
    beginning = [source.randrange(512) for _ in range(300)]
    prompts = [
        (beginning if index % 4 else []) + [source.randrange(512) for _ in range(source.randrange(1, 20))]
        for index in range(20)
    ]
    chosen = [source.choice([None, None, next(iter(adapters))]) for _ in prompts]
    params = [
        sidestream.SamplingParams(temperature=index % 2, seed=index, max_tokens=24, ignore_eos=True, logprobs=1)
        for index in range(len(prompts))
    ]
    answers = []
    for limits in ((0, 0), (32, 16)):
        monkeypatch.setattr(model_loader, "cascade_limits", lambda *_, limits=limits: limits)
        llm = sidestream.LLM(
            MODEL,
            adapters,
            load_format="dummy",
            precision="int8",
            device="cpu",
            max_model_len=384,
            max_num_seqs=12,
            max_num_batched_tokens=128,
            num_kv_pages=18,
            show_progress=False,
        )
        outputs = llm.generate(prompts, params, adapter=chosen, use_tqdm=False)
        answers.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs])
        used = [each for each in llm.engine.runner.programs._programs.values() if each.uses]
        kinds = {
            (each.bound.program.bucket.cascade, step.op)
            for each in used
            for step in each.bound.program.steps
            if step.op == "sidestream.prefix_attention"
        }
        assert kinds == ({(True, "sidestream.prefix_attention")} if limits[0] else set())
        assert llm.engine.scheduler.states.preemptions
        llm.close()
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True])
def test_on_the_gpu(lora: bool, tmp_path: Any) -> None:
    """128 requests with a common prefix run in the captured program with cascade attention, and say what they say
    without it. Roundings differ, and a greedy token of random weights may be a tie; but another context would change
    nearly all.
    """
    fields = LLAMA_8B | {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000, "head_dim": 128}
    fields["max_position_embeddings"] = 2048
    adapters = write_model(tmp_path, fields, 1, 16) if lora else {}
    sizes: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 128, "num_kv_pages": 1000}
    llm = sidestream.LLM(fields, adapters, load_format="dummy", show_progress=False, **sizes)
    source = random.Random(0)
    beginning = [source.randrange(32000) for _ in range(800)]
    prompts = [beginning + [source.randrange(32000) for _ in range(source.randrange(1, 60))] for _ in range(128)]
    params = sidestream.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    programs = llm.engine.runner.programs._programs
    scheduler: Any = llm.engine.scheduler
    answers = []
    for tile in (scheduler.limits.cascade_tile, 0):
        scheduler._shared_prefixes._tile = tile
        before = {bucket: each.uses for bucket, each in programs.items()}
        outputs = llm.generate(prompts, params, adapter=next(iter(adapters), None), use_tqdm=False)
        answers.append([each.outputs[0].token_ids for each in outputs])
        used = [bucket for bucket, each in programs.items() if each.uses > before.get(bucket, 0)]
        assert any(bucket.cascade and bucket.lora == lora for bucket in used) == (tile > 0)
    assert scheduler.stats().cascade_steps >= 5
    llm.close()
    compared = [(one[1], other[1]) for one, other in zip(*answers, strict=True) if one[0] == other[0]]
    assert len(compared) > 100 and sum(one == other for one, other in compared) > 0.8 * len(compared)
