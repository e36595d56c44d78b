"""Conversations with `LLM`, its tokenizer, and its end."""

import dataclasses
import gc
import json
import shutil
import threading
import time
import weakref
from pathlib import Path

import pytest
import tokenizers
from sidestream.graphs.adapter_config import AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.adapters.describer import AdapterDescriber
from sidestream.runtime.adapters.registry import AdapterRegistry
from sidestream.runtime.api.beam_search import BeamSearchParams
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.lora_request import LoRARequest
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from sidestream.runtime.text.chat_files import ChatTemplateError
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"device": "cpu", "show_progress": False, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 48}
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def adapter(base):
    return tiny_adapters(base, [AdapterSpec(rank=4)])[0]


@pytest.fixture(scope="module")
def llm(base, adapter):
    (base.path / "chat_template.jinja").write_text(TEMPLATE)
    (base.path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with LLM(base.path, {"first": adapter}, precision="fp32", **SMALL) as llm:
        yield llm


def test_an_answer_is_that_to_the_prompt_which_the_template_makes(llm):
    hello, bye = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]
    prompts = ["<s><user>hello<assistant>", "<s><user>bye<assistant>"]  # this tokenizer adds no BOS of its own
    outputs = llm.chat([hello, bye], GREEDY, adapter=[None, "first"], use_tqdm=False)
    expected = llm.generate(prompts, GREEDY, adapter=[None, "first"], use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    assert [output.adapter for output in outputs] == [None, "first"]
    (one,) = llm.chat(hello, GREEDY, use_tqdm=False)
    assert one.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    changed = {"chat_template": "{{ messages[0].content }}{{ x }}", "chat_template_kwargs": {"x": "!"}}
    (other,) = llm.chat(hello, GREEDY, use_tqdm=False, **changed)
    assert other.prompt == "hello!"
    with pytest.raises(RequestError, match="messages must be a list"):
        llm.chat("hello")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"added_tokens.json": {"<call>": 300}}, r"'<call>' \(300\); add them to the base model's tokenizer"),
        ({"added_tokens.json": {"<call>": 900}}, "embeddings for ids below 320: train without added tokens"),
        ({"added_tokens.json": {"</s>": 256}}, r"have other ids there.*'</s>' \(256\)"),
        ({"tokenizer_config.json": {"additional_special_tokens": ["<call>"]}}, "1 tokens of its tokenizer.*'<call>'"),
        ({"tokenizer.json": {"added_tokens": [{"id": 300, "content": "a b"}]}}, r"\(a text of 3 characters\) \(300\)"),
        ({"added_tokens.json": {"<pad>": 900}, "tokenizer_config.json": {"pad_token": "<pad>"}}, None),
        ({"added_tokens.json": {"</s>": 257, "a": 97}}, None),
    ],
    ids=str,
)
def test_tokens_that_the_base_model_lacks_are_refused(base, llm, adapter, tmp_path, caplog, files, words):
    """In this process and in the one that describes adapters; only padding may be new. Lenient is a warning."""
    own = shutil.copytree(adapter, tmp_path / "own")
    for name, content in files.items():
        (own / name).write_text(json.dumps(content))
    if words is None:
        llm.add_adapter("own", own)
        llm.remove_adapter("own")
        return
    with pytest.raises(AdapterError, match=rf"adapter 'own': .*{words}"):
        llm.add_adapter("own", own)
    config = LlamaConfig.from_directory(base.path)
    describer = AdapterDescriber()
    try:
        with pytest.raises(AdapterError, match=words):
            AdapterRegistry(config, 64, describe=describer, base=base.path).add("own", own)
    finally:
        describer.close()
    AdapterRegistry(config, 64, lenient=True, base=base.path).add("own", own)
    assert "adapter 'own'" in caplog.text and "lora_lenient=True" in caplog.text


def test_no_second_bos_where_the_tokenizer_adds_one(base, tmp_path):
    path = shutil.copytree(base.path, tmp_path / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(path / "tokenizer.json"))
    with LLM(path, precision="fp32", **SMALL) as llm:
        (output,) = llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [256, *b"<user>x<assistant>"]


def test_an_adapter_has_its_own_template(llm, adapter, tmp_path):
    """Each conversation has the template of its adapter, with the tokens that its own files name."""
    own = shutil.copytree(adapter, tmp_path / "own")
    said = "{% for m in messages %}[{{ m.content }}{{ eos_token }}]{% endfor %}{{ bos_token }}"
    (own / "chat_template.jinja").write_text(said)
    added = {"256": {"content": "<s>", "special": True}, "257": {"content": "</s>", "special": True}}
    (own / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "added_tokens_decoder": added}))
    llm.add_adapter("own", own)
    try:
        hello, call = {"role": "user", "content": "hello"}, {"function": {"name": "f", "arguments": "{}"}}
        talks = [[hello], [hello, {"role": "assistant", "content": None, "tool_calls": [call]}], [hello]]
        outputs = llm.chat(talks, GREEDY, adapter=["first", "own", None], use_tqdm=False)
        base = "<s><user>hello<assistant>"
        assert [output.prompt for output in outputs] == [base, "[hello</s>][</s>]<s>", base]
        assert outputs[1].prompt_token_ids == [*b"[hello", 257, *b"][", 257, *b"]", 256]
        (output,) = llm.chat([hello], GREEDY, lora_request=LoRARequest("own", 3), use_tqdm=False)
        assert output.prompt == "[hello</s>]<s>"
    finally:
        llm.remove_adapter("own")
    with pytest.raises(RequestError, match="adapter has 2 entries"):
        llm.chat([hello], GREEDY, adapter=["first", "first"], use_tqdm=False)


def test_an_adapter_as_vllm_names_it(llm, base, adapter):
    first, late = LoRARequest("first", 1), LoRARequest("late", 2, str(adapter))
    by_name = llm.generate(["a", "b", "c"], GREEDY, adapter=["first", None, "first"], use_tqdm=False)
    by_request = llm.generate(["a", "b", "c"], GREEDY, lora_request=[first, None, late], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in by_request] == [out.outputs[0].token_ids for out in by_name]
    assert [output.adapter for output in by_request] == ["first", None, "late"] and "late" in llm.adapters
    assert [output.lora_request for output in by_request] == [first, None, late]
    assert [output.lora_request for output in by_name] == [None] * 3
    outputs = llm.chat([[{"role": "user", "content": "x"}]] * 2, GREEDY, lora_request=late, use_tqdm=False)
    assert [output.lora_request for output in outputs] == [late, late]
    for asked, said in [
        (LoRARequest("nobody", 3), "'nobody' is not known"),
        (LoRARequest("first", 1, str(base.path)), "loaded from another directory"),
        ("first", "must be a LoRARequest"),
        (7, "not int"),
        ([first], "1 entries for 2 prompts"),
    ]:
        with pytest.raises(RequestError, match=said):
            llm.generate(["a", "b"], GREEDY, lora_request=asked, use_tqdm=False)
    with pytest.raises(RequestError, match="give one of them"):
        llm.generate("a", GREEDY, "first", lora_request=first, use_tqdm=False)
    for name, number in (("", 1), ("x", 0)):
        with pytest.raises(RequestError, match="lora_"):
            LoRARequest(name, number)


def test_results_say_when(llm):
    before = time.time()
    short, long = (
        output.metrics
        for output in llm.generate(
            ["a", "b"], [dataclasses.replace(GREEDY, max_tokens=count) for count in (1, 6)], use_tqdm=False
        )
    )
    after = time.time()
    for metrics in (short, long):
        assert before <= metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time <= after
    assert long.first_token_time < long.finished_time and short.finished_time < long.finished_time


def test_priority_decides_who_comes_first(llm):
    outputs = llm.generate(["x"] * 6, GREEDY, priority=[5, 4, 3, 2, 1, 0], use_tqdm=False)  # four at a time
    firsts = [output.metrics.first_token_time for output in outputs]
    assert max(firsts[2:]) < min(firsts[:2])
    with pytest.raises(RequestError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["x", "y"], priority=[1], use_tqdm=False)


@pytest.mark.parametrize("prompts", [b"abc", bytearray(b"abc"), memoryview(b"abc"), [b"abc"], [memoryview(b"abc")]])
def test_bytes_are_no_prompt(llm, prompts):
    with pytest.raises(RequestError, match=r"not (bytes|bytearray|memoryview)"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_the_prefix_cache_can_be_reset(llm):
    prompt = list(range(150))

    def cached(**fields: bool) -> int:
        params = dataclasses.replace(GREEDY, **fields)
        return llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens

    assert llm.reset_prefix_cache() and [cached(), cached()] == [0, 128]
    assert [cached(skip_reading_prefix_cache=skip) for skip in (True, False)] == [0, 128]
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    assert not llm.reset_prefix_cache(), "a stream is open"
    stream.close()
    assert cached() == 128
    assert llm.reset_prefix_cache() and [cached(), cached()] == [0, 128]


def test_the_tokenizer(llm):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("To be")) == "To be"


def test_a_model_without_a_template_and_one_without_a_tokenizer(tmp_path):
    bare = tiny_llama(tmp_path)
    with LLM(bare.path, precision="fp32", **SMALL) as llm:
        with pytest.raises(ChatTemplateError, match="the model has no chat template"):
            llm.chat([{"role": "user", "content": "x"}])
        with pytest.raises(RequestError, match="use token ids"):
            llm.get_tokenizer()


def test_close_gives_memory_and_threads_back(base, adapter):
    before = set(threading.enumerate())
    llm = LLM(base.path, {"first": adapter}, precision="fp32", **SMALL)
    llm.generate("x", GREEDY, adapter="first", use_tqdm=False)
    own = {"adapter_read", "adapter_copy", "adapter-keeper"}  # others serve the whole process
    started = [thread for thread in threading.enumerate() if thread not in before and thread.name in own]
    assert {"adapter_read", "adapter_copy"} <= {thread.name for thread in started}
    runner = weakref.ref(llm.model.runner)
    held = [weakref.ref(tensor) for tensor in llm.model.runner.tensors.values()]
    stream = llm.stream("open", GREEDY)
    second, third = llm.stream("second", GREEDY), llm.stream("third", GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="still open"):
        next(second)
    llm.close()
    llm.close()
    gc.collect()
    assert runner() is None and not any(tensor() is not None for tensor in held)
    for thread in started:
        thread.join(60)  # after its present job
        assert not thread.is_alive()
    for left in (stream, third):
        with pytest.raises(RequestError, match="this LLM is closed"):
            next(left)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("x", use_tqdm=False),
        lambda llm: llm.stream("x"),
        lambda llm: llm.chat([{"role": "user", "content": "x"}]),
        lambda llm: llm.add_adapter("x", Path("x")),
        lambda llm: llm.remove_adapter("first"),
        lambda llm: llm.prefetch_adapters(),
        lambda llm: llm.get_tokenizer(),
        lambda llm: llm.reset_prefix_cache(),
        lambda llm: llm.beam_search("x", BeamSearchParams(2, 2)),
        lambda llm: llm.sleep(),
        lambda llm: llm.wake_up(),
        lambda llm: llm.is_sleeping(),
        lambda llm: llm.generate("x", lora_request=LoRARequest("first", 1), use_tqdm=False),
        lambda llm: llm.adapters,
        lambda llm: llm.max_model_len,
        lambda llm: llm.__enter__(),
    ],
)
def test_a_closed_llm_says_so(closed, call):
    with pytest.raises(RequestError, match="this LLM is closed; make a new one"):
        call(closed)


@pytest.fixture(scope="module")
def closed(base):
    llm = LLM(base.path, precision="fp32", **SMALL)
    llm.close()
    return llm
