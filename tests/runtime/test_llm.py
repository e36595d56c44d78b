"""LLM from directory to text, against transformers and peft."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from sidestream.compiler.options import OptionError
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.tiny import TINY, AdapterSpec, oracle_greedy, oracle_logits, tiny_adapters, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SMALL = {"device": "cpu", "show_progress": False, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 48}
SPECS = [
    AdapterSpec(rank=4),
    AdapterSpec(rank=20, use_rslora=True, targets=("q_proj", "down_proj")),
    AdapterSpec(rank=8, targets="all-linear"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, max_shard_size="200KB")


@pytest.fixture(scope="module")
def adapters(base):
    return dict(zip(("first", "second", "third"), tiny_adapters(base, SPECS), strict=True))


@pytest.fixture(scope="module")
def llm(base, adapters):
    return LLM(
        base.path,
        {name: adapters[name] for name in ("first", "second")},
        precision="fp32",
        max_loras=1,
        num_kv_pages=7,
        max_lora_rank=32,
        **SMALL,
    )


def prompts(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def assert_idle(llm):
    scheduler = llm.engine.scheduler
    assert (
        not llm.engine.has_work
        and scheduler.states.pages.num_free == llm.num_pages
        and scheduler.states.rows.num_free == scheduler.limits.max_num_seqs
    )


def test_greedy_tokens_are_those_of_transformers_and_peft(llm, base, adapters):
    """More adapters than slots, prompts longer than a step, and too few pages for all at once."""
    batch = prompts(5, 120, 1, 70, 90, 33, 64)
    chosen = [None, "first", "second", "first", None, "second", "first"]
    outputs = llm.generate(batch, GREEDY, adapter=chosen, use_tqdm=False)
    for ids, adapter, output in zip(batch, chosen, outputs, strict=True):
        assert (output.prompt_token_ids, output.adapter, output.finished) == (ids, adapter, True)
        assert output.outputs[0].token_ids == oracle_greedy(base, adapters.get(adapter), ids, 10)
        assert output.outputs[0].finish_reason == "length"
    assert_idle(llm)


def test_steps_that_are_planned_ahead_give_the_same_tokens(llm):
    """As on a GPU: the next step's input tokens come from the last step's samples on the device, and results are
    read one step late.
    """
    batch, chosen = prompts(5, 50, 9, 33, 64), [None, "first", None, "first", "second"]
    params = [dataclasses.replace(GREEDY, max_tokens=4 + 3 * index) for index in range(5)]
    expected = llm.generate(batch, params, adapter=chosen, use_tqdm=False)
    llm.engine._depth = 1
    try:
        outputs = llm.generate(batch, params, adapter=chosen, use_tqdm=False)
    finally:
        llm.engine._depth = 0
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    assert_idle(llm)


def test_preemption_does_not_change_the_output(llm):
    batch = prompts(60, 61, 62, 63)
    params = dataclasses.replace(GREEDY, max_tokens=70)
    alone = [llm.generate(ids, params, use_tqdm=False)[0].outputs[0].token_ids for ids in batch]
    seen = []
    preempt = llm.engine.scheduler.preemption.preempt
    llm.engine.scheduler.preemption.preempt = lambda sequence: (seen.append(sequence), preempt(sequence))
    together = llm.generate(batch, params, use_tqdm=False)
    llm.engine.scheduler.preemption.preempt = preempt
    assert seen, "seven pages do not hold four sequences of three pages"
    assert sum(output.num_preemptions for output in together) == len(seen)
    assert [output.outputs[0].token_ids for output in together] == alone
    assert_idle(llm)


def test_log_probabilities_are_those_of_transformers(llm, base, adapters):
    (ids,) = prompts(12)
    (output,) = llm.generate(
        ids,
        dataclasses.replace(GREEDY, logprobs=3, max_tokens=4, temperature=1.0, seed=3),
        adapter="first",
        use_tqdm=False,
    )
    completion = output.outputs[0]
    expected = oracle_logits(base, adapters["first"], ids + completion.token_ids).log_softmax(-1)[len(ids) - 1 : -1]
    for token, row, found in zip(completion.token_ids, expected, completion.logprobs, strict=True):
        assert next(iter(found)) == token
        best = row.topk(3).indices.tolist()
        assert set(found) == {token, *best}
        for other, entry in found.items():
            assert entry.logprob == pytest.approx(float(row[other]), abs=1e-3)
            assert entry.rank == int((row > row[other]).sum()) + 1
    total = sum(found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_a_seed_fixes_the_draw_whatever_else_runs(llm):
    batch = prompts(9, 20, 31)
    params = SamplingParams(
        temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=11, max_tokens=12, n=2, ignore_eos=True
    )
    alone = llm.generate(batch[1], params, use_tqdm=False)[0]
    noise = SamplingParams(temperature=1.5, max_tokens=9)
    together = llm.generate(batch, [noise, params, noise], adapter=["first", None, "second"], use_tqdm=False)[1]
    assert [completion.token_ids for completion in alone.outputs] == [
        completion.token_ids for completion in together.outputs
    ]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids
    again = llm.generate(batch[1], dataclasses.replace(params, n=1, seed=12), use_tqdm=False)[0]
    assert again.outputs[0].token_ids == alone.outputs[1].token_ids


def test_penalties_biases_and_bans(llm):
    (ids,) = prompts(10)

    def complete(**fields):
        return llm.generate(ids, dataclasses.replace(GREEDY, **fields), use_tqdm=False)[0].outputs[0]

    assert complete(logit_bias={42: 100.0}).token_ids == [42] * 10
    varied = complete(logit_bias={42: 5.0, 43: 4.5, 44: 4.0}, presence_penalty=2.0, repetition_penalty=50.0)
    assert len(set(varied.token_ids)) > 3
    long = complete(max_tokens=8, min_tokens=5, stop_token_ids=[42], logit_bias={42: 100.0})
    assert (
        long.token_ids[5:] == [42]
        and 42 not in long.token_ids[:5]
        and (long.finish_reason, long.stop_reason) == ("stop", 42)
    )


def test_text_streams_and_stop_strings(llm):
    texts = ["To be, or not to be", "ünïcödé 🦊"]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate(texts, params, adapter=[None, "first"], use_tqdm=False)
    pieces = ["", ""]
    reasons = [None, None]
    for chunk in llm.stream(texts, params, adapter=[None, "first"]):
        pieces[chunk.prompt_index] += chunk.text
        reasons[chunk.prompt_index] = chunk.finish_reason
    assert pieces == [output.outputs[0].text for output in outputs] and reasons == ["length", "length"]
    assert [output.prompt for output in outputs] == texts
    stop = pieces[0][4:6]
    stopped = llm.generate(texts[0], dataclasses.replace(params, stop=stop), use_tqdm=False)[0].outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (
        pieces[0][: pieces[0].index(stop)],
        "stop",
        stop,
    )
    assert_idle(llm)


def test_a_stream_that_is_left_early_leaves_nothing_behind(llm):
    chunks = llm.stream(prompts(30, 40), GREEDY)
    next(chunks)
    with pytest.raises(RequestError, match="still open"):
        llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    chunks.close()
    assert_idle(llm)
    llm.generate([1, 2, 3], GREEDY, use_tqdm=False)


def test_a_call_is_refused_while_another_thread_s_runs(llm, monkeypatch):
    """From its first step to the last abort: each step returns the outputs of all requests."""
    refused = []

    def call():
        try:
            llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
        except RequestError as problem:
            refused.append(str(problem))

    def meanwhile(method):
        def run(*arguments):
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=call)
                other.start()
                other.join()
            return method(*arguments)

        return run

    chunks = llm.stream(prompts(30, 40), GREEDY)
    next(chunks)
    for name in ("step", "abort"):
        monkeypatch.setattr(llm.engine, name, meanwhile(getattr(llm.engine, name)))
    next(chunks)
    assert len(refused) == 1 and "a call of another thread" in refused[0]
    chunks.close()
    monkeypatch.undo()
    assert len(refused) >= 3  # two requests were aborted
    assert_idle(llm)
    llm.generate([1, 2, 3], GREEDY, use_tqdm=False)


def test_adapters_come_and_go(llm, base, adapters):
    (ids,) = prompts(14)
    llm.add_adapter("later", adapters["third"])
    assert llm.adapters == ("first", "second", "later")
    assert llm.generate(ids, GREEDY, adapter="later", use_tqdm=False)[0].outputs[0].token_ids == oracle_greedy(
        base, adapters["third"], ids, 10
    )
    llm.remove_adapter("later")
    with pytest.raises(RequestError, match="'later' is not known"):
        llm.generate(ids, GREEDY, adapter="later", use_tqdm=False)
    llm.add_adapter("later", adapters["first"])
    assert llm.generate(ids, GREEDY, adapter="later", use_tqdm=False)[0].outputs[0].token_ids == oracle_greedy(
        base, adapters["first"], ids, 10
    )
    llm.remove_adapter("later")
    with pytest.raises(RequestError, match="already been loaded"):
        llm.add_adapter("first", adapters["third"])
    with pytest.raises(RequestError, match="letters, digits"):
        llm.add_adapter("a/b", adapters["third"])


@pytest.mark.parametrize(
    ("precision", "options", "tolerance"),
    [
        ("bf16", {}, 0.04),
        ("fp8", {}, 0.35),
        ("int8", {}, 0.12),
        ("fp8", {"kv_cache_dtype": "int8", "hadamard": False, "lm_head": "bf16"}, 0.35),
    ],
    ids=["bf16", "fp8", "int8", "fp8-int8"],
)
def test_lower_precision_stays_near_transformers(base, adapters, precision, options, tolerance):
    small = LLM(base.path, adapters, precision=precision, **options, **SMALL)
    batch, chosen = prompts(5, 100, 40, 7), [None, "first", "second", "third"]
    outputs = small.generate(batch, dataclasses.replace(GREEDY, logprobs=0), adapter=chosen, use_tqdm=False)
    for ids, adapter, output in zip(batch, chosen, outputs, strict=True):
        completion = output.outputs[0]
        expected = oracle_logits(base, adapters.get(adapter), ids + completion.token_ids).log_softmax(-1)[
            len(ids) - 1 : -1
        ]
        own = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        found = torch.tensor(
            [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        )
        assert (found - own).abs().mean() < tolerance
        assert (expected.amax(-1) - own).mean() < tolerance, (
            "tokens were chosen that transformers finds much less likely"
        )


def test_random_weights_without_a_directory():
    outputs = []
    for _ in range(2):
        dummy = LLM(
            {**TINY, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            load_format="dummy",
            precision="bf16",
            **SMALL,
        )
        outputs.append(dummy.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0])
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[0].text == ""
    with pytest.raises(RequestError, match="text needs a tokenizer"):
        dummy.generate("text", use_tqdm=False)
    with pytest.raises(RequestError, match="started without adapters"):
        dummy.add_adapter("x", Path("nowhere"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, None),
        ({"prompts": [[1], []]}, "prompt 1: the prompt is empty"),
        ({"prompts": [1, 320]}, "token id 320 is out of vocabulary: the model has 320 tokens"),
        ({"prompts": [[1], [5, -3]]}, "prompt 1: token id -3 is out of vocabulary"),
        ({"prompts": [1] * 256}, "max_model_len=256; shorten it or raise max_model_len"),
        ({"prompts": {"prompt": "a", "prompt_token_ids": [1]}}, "exactly one of the keys"),
        ({"prompts": {"text": "a"}}, "exactly one of the keys"),
        ({"prompts": 3}, "prompts must be text"),
        ({"prompts": [[1.5]]}, "prompt is text or a list of token ids"),
        ({"prompts": [1], "adapter": "nobody"}, "'nobody' is not known (known: first, second)"),
        ({"prompts": [[1], [2]], "adapter": ["first"]}, "adapter has 1 entries for 2 prompts"),
        ({"prompts": [1], "sampling_params": {"n": 1}}, "must be a SamplingParams"),
        ({"prompts": [1], "sampling_params": SamplingParams(logit_bias={999: 1})}, "logit_bias names token 999"),
        ({"prompts": [1], "sampling_params": SamplingParams(stop_token_ids=[999])}, "stop_token_ids names token 999"),
    ],
    ids=str,
)
def test_requests_that_cannot_be_served(llm, arguments, message):
    if message is None:
        assert llm.generate(**arguments, use_tqdm=False) == []
        return
    with pytest.raises(RequestError) as caught:
        llm.generate(**arguments, use_tqdm=False)
    assert message in str(caught.value)
    with pytest.raises(RequestError):
        llm.stream(**arguments)
    assert_idle(llm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "no/such/model"}, "download the model first"),
        ({"model": dict(TINY)}, "load_format='dummy'"),
        ({"precision": "fp8", "dtype": "float32"}, "precision='fp32'"),
        ({"precision": "fp32", "dtype": "bfloat16"}, "precision='bf16'"),
        ({"dtype": "float16"}, "dtype='float16' is not supported"),
        ({"precision": "bf16", "kv_cache_dtype": "fp8"}, "contradicts precision='bf16'"),
        ({"kv_dtype": "int8", "kv_cache_dtype": "fp8"}, "two names of one option"),
        ({"precision": "bf16", "hadamard": True}, "hadamard=True"),
        ({"disable_passes": ("no_such",)}, "no_such"),
        ({"max_model_len": 4096}, "max_position_embeddings=1024"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens=4 is less"),
        ({"max_num_seqs": 257}, "max_num_seqs=257"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"max_model_len": 640, "num_kv_pages": 9}, "num_kv_pages=9"),
        ({"max_loras": 3}, "max_loras=3 without adapters"),
        ({"device": "cuda:7"}, "device='cuda:7' is not available"),
        ({"device": "tpu"}, "use 'cuda', 'cuda:0' or 'cpu'"),
        ({"load_format": "pickle"}, "load_format='pickle'"),
        ({"adapters": {"a b": "x"}}, "letters, digits"),
        ({"adapters": {"a": "no/such"}}, "no/such"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_fail_before_any_work(base, arguments, message):
    with pytest.raises(ValueError) as caught:
        LLM(**{"model": base.path, "device": "cpu", "show_progress": False, **arguments})
    assert message in str(caught.value)
    if "max_loras" not in arguments and "adapters" not in arguments:
        assert isinstance(caught.value, OptionError)
