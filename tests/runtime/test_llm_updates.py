"""LLM.update_adapter: tensors in memory answer like a directory of peft; versions, switches, bad input."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.adapter_config import AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.files.update_file import private_update
from sidestream.runtime.adapters.describer import AdapterDescriber
from sidestream.runtime.adapters.registry import AdapterRegistry
from sidestream.runtime.api.adapter_update import AdapterUpdate
from sidestream.runtime.api.adapter_versions import VersionConflictError
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.tiny import AdapterSpec, oracle_greedy, tiny_adapters, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
OPTIONS = {
    "device": "cpu",
    "show_progress": False,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_lora_rank": 16,
    "lora_target_modules": "all",
    "lora_parts": ["dora"],
    "precision": "fp32",
}
PROMPT = list(range(5, 61))  # a page is filled in the middle of an answer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def adapters(base):
    return tiny_adapters(
        base,
        [
            AdapterSpec(rank=4),
            AdapterSpec(rank=8, targets="all-linear", use_rslora=True),
            AdapterSpec(rank=4, targets=("q_proj", "v_proj"), extra={"use_dora": True}),
            AdapterSpec(rank=2, targets=("down_proj",)),
            AdapterSpec(rank=24),
        ],
    )


@pytest.fixture(scope="module")
def shared(base):
    with LLM(base.path, max_loras=2, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """An engine without adapters."""
    yield shared
    for name in {name.partition("@")[0] for name in shared.adapters}:
        shared.remove_adapter(name)
    assert not shared.engine.has_work
    assert shared.engine.scheduler.states.pages.num_free == shared.num_pages


def stored(path):
    """The tensors and config of a directory."""
    return load_file(path / "adapter_model.safetensors"), json.loads((path / "adapter_config.json").read_text())


def answers(llm, *names, prompt=PROMPT):
    """Token ids and log-probabilities of a batch, one request for each name."""
    outputs = llm.generate([prompt] * len(names), GREEDY, adapter=list(names), use_tqdm=False)
    return [
        (
            output.outputs[0].token_ids,
            [[(token, each.logprob) for token, each in entry.items()] for entry in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def streamed(llm, names, updates, prompt=PROMPT):
    """Stream a request for each name; call `updates[count]` once the first request has `count` tokens. Returns the
    tokens and the versions of each.
    """
    tokens, versions = [[] for _ in names], [None for _ in names]
    for chunk in llm.stream([prompt] * len(names), GREEDY, adapter=list(names)):
        tokens[chunk.prompt_index] += chunk.token_ids
        versions[chunk.prompt_index] = chunk.versions
        if chunk.prompt_index == 0 and len(tokens[0]) in updates:
            updates.pop(len(tokens[0]))()
    assert not updates
    return tokens, versions


@torch.no_grad()
def switched_greedy(base, old, new, begin, prompt=PROMPT):
    """A prompt's answer with a KV cache that `old` computes before the answer's token `begin`, and `new` after it."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(copy.deepcopy(base.model), old, "old").eval()
    model.load_adapter(new, "new")
    model.set_adapter("old")
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    tokens = [int(out.logits[0, -1].argmax())]
    while len(tokens) < GREEDY.max_tokens:
        if len(tokens) == begin:
            model.set_adapter("new")
        out = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_update_answers_like_a_directory(base, adapters, precision):
    with LLM(base.path, max_loras=3, **{**OPTIONS, "precision": precision}) as llm:
        for index, path in enumerate(adapters[:4], 1):
            made = llm.update_adapter("policy", *stored(path))
            llm.add_adapter("file", path, replace=True)
            assert made == ("policy", index, llm.registry.by_number(llm.registry.numbers["file"]).content_hash)
            newest, pinned, file = answers(llm, "policy", f"policy@{index}", "file")
            assert newest == pinned == file
            if precision == "fp32":
                assert file[0] == oracle_greedy(base, path, PROMPT, GREEDY.max_tokens)
        assert answers(llm, "policy@1", "policy@2", "policy@3", "policy@4", None) == [
            answers(llm, name)[0] for name in ("policy@1", "policy@2", "policy@3", "policy@4", None)
        ], "a batch of several versions answers like each alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_model_of_a_trainer(llm, base, tmp_path, dtype):
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    model = get_peft_model(copy.deepcopy(base.model), LoraConfig(r=8, target_modules=["q_proj", "o_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.to(dtype)
    made = llm.update_adapter("policy", get_peft_model_state_dict(model), model.peft_config["default"])
    model.save_pretrained(tmp_path)
    llm.add_adapter("file", tmp_path)
    assert made.content == llm.registry.hashes[llm.registry.numbers["file"]]
    policy, file, without = answers(llm, "policy", "file", None)
    assert policy == file != without


def test_random_adapters_are_packed_to_the_bits_of_a_directory(base, tmp_path):
    paths = tiny_adapters(base, [AdapterSpec(rank=rank, targets="all-linear") for rank in (1, 5, 16)], seed=7)
    with LLM(base.path, max_loras=2, **{**OPTIONS, "precision": "int8"}) as llm:
        store = llm.model.runner.slot_loader.store
        for path in paths:
            llm.add_adapter("file", path, replace=True)
            llm.update_adapter("policy", *stored(path))
            blocks = [store.prepare(llm.registry.numbers[name]) for name in ("file", "policy")]
            assert torch.equal(*(torch.from_numpy(block.bytes) for block in blocks))
            for block in blocks:
                store.release(block)


def test_running_requests_keep_their_version(llm, base, adapters):
    llm.update_adapter("policy", *stored(adapters[0]))
    tokens, versions = streamed(
        llm, ["policy", "policy@1"], {1: lambda: llm.update_adapter("policy", *stored(adapters[1]))}
    )
    assert tokens == [oracle_greedy(base, adapters[0], PROMPT, GREEDY.max_tokens)] * 2 and versions == [None, None]
    assert answers(llm, "policy")[0][0] == oracle_greedy(base, adapters[1], PROMPT, GREEDY.max_tokens)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("max_loras", [1, 2])
def test_a_switch_keeps_the_cache_and_says_where(base, adapters, max_loras, pinned):
    """With one slot the new version takes the old one's; a request that pins the old one delays that until it ends."""
    with LLM(base.path, max_loras=max_loras, **OPTIONS) as llm:
        llm.update_adapter("policy", *stored(adapters[0]))
        names = ["policy", "policy@1"] if pinned else ["policy", "policy"]
        switch = {3: lambda: llm.update_adapter("policy", *stored(adapters[1]), inflight="switch")}
        tokens, versions = streamed(llm, names, switch)
        old = oracle_greedy(base, adapters[0], PROMPT, GREEDY.max_tokens)
        if pinned and max_loras == 1:
            assert (tokens, versions) == ([old, old], [None, None])
        else:
            for each, parts in zip(tokens, versions, strict=True):
                if parts is None:
                    assert pinned and each == old
                    continue
                (first, version), (begin, later) = parts
                assert (first, version, later) == (0, 1, 2) and 2 <= begin <= 7
                assert each == switched_greedy(base, adapters[0], adapters[1], begin) != old
            assert [parts is None for parts in versions] == [False, pinned]
        whole = PROMPT + tokens[0] + PROMPT  # more than a page that was filled after the switch
        fresh = oracle_greedy(base, adapters[1], whole, GREEDY.max_tokens)
        assert answers(llm, "policy", prompt=whole)[0][0] == fresh


def test_a_switch_moves_waiting_and_preempted_requests(base, adapters):
    """Four requests with pages for two, which grow. A preempted one is computed again with the new version only."""
    prompt, count = PROMPT + PROMPT[:4], GREEDY.max_tokens
    with LLM(base.path, max_loras=1, num_kv_pages=3, **{**OPTIONS, "max_model_len": 128}) as llm:
        llm.update_adapter("policy", *stored(adapters[0]))
        switch = {2: lambda: llm.update_adapter("policy", *stored(adapters[1]), inflight="switch")}
        tokens, versions = streamed(llm, ["policy"] * 4, switch, prompt)
        for each, parts in zip(tokens, versions, strict=True):
            begin = parts[-1][0] if parts else 0
            kept = switched_greedy(base, adapters[0], adapters[1], begin, prompt) if begin else []
            again = (
                each[:place] + oracle_greedy(base, adapters[1], prompt + each[:place], count - place)
                for place in range(begin, count)
                if each[:place] == kept[:place]
            )
            assert each == kept or each in again
        assert versions[0] is not None and None in versions, "some run, some wait"
        assert llm.engine.scheduler.stats().preemptions


def test_a_switch_with_drafts(base, adapters):
    with LLM(base.path, max_loras=1, speculation=3, **OPTIONS) as llm:
        llm.update_adapter("policy", *stored(adapters[0]))
        llm.generate([PROMPT], GREEDY, adapter="policy", use_tqdm=False)  # a source of drafts
        switch = {2: lambda: llm.update_adapter("policy", *stored(adapters[1]), inflight="switch")}
        (tokens,), (versions,) = streamed(llm, ["policy"], switch)
        assert tokens == switched_greedy(base, adapters[0], adapters[1], versions[1][0])


def test_versions_are_kept_named_and_removed(base, adapters):
    with LLM(base.path, max_loras=2, adapter_versions=2, **OPTIONS) as llm:
        tensors, config = stored(adapters[0])
        assert llm.update_adapter("policy", tensors, config, version=5).version == 5
        assert llm.update_adapter("policy", tensors, config).version == 6
        for version in (6, 2):
            with pytest.raises(VersionConflictError, match=f"has version 6, and version={version}.*leave version out"):
                llm.update_adapter("policy", tensors, config, version=version)
        assert set(llm.adapters) == {"policy", "policy@5", "policy@6"}
        llm.update_adapter("policy", tensors, config)
        assert set(llm.adapters) == {"policy", "policy@6", "policy@7"}, "the two newest"
        with pytest.raises(RequestError, match="'policy@5' is not known"):
            answers(llm, "policy@5")
        with pytest.raises(RequestError, match="newest version of 'policy'"):
            llm.remove_adapter("policy@7")
        llm.remove_adapter("policy@6")
        assert set(llm.adapters) == {"policy", "policy@7"}
        assert answers(llm, {"policy@7": 1.0}) == answers(llm, "policy")
        llm.add_adapter("policy", adapters[1], replace=True)
        assert set(llm.adapters) == {"policy"}, "a directory replaces all versions"
        llm.update_adapter("policy", tensors, config)
        llm.remove_adapter("policy")
        assert not llm.adapters
        answers(llm, None)
        assert not llm.registry._by_number, "nothing is left of them"


def test_no_file_is_written(llm, adapters):
    folders = [os.environ["SIDESTREAM_CACHE"], os.environ["XDG_STATE_HOME"]]
    before = {path for folder in folders for path in Path(folder).rglob("*") if "adapter" in str(path)}
    tensors, config = stored(adapters[3])
    llm.update_adapter("policy", {name: value * 1.25 for name, value in tensors.items()}, config)
    answers(llm, "policy")
    if llm.registry.disk_cache is not None:
        assert llm.registry.disk_cache.jobs.flush(60)
    assert {path for folder in folders for path in Path(folder).rglob("*") if "adapter" in str(path)} == before


def changed(tensors, **values):
    """Tensors of which the first one is another."""
    name = next(iter(tensors))
    return {**tensors, name: values["make"](tensors[name])}


BAD = [
    (lambda t, c: (changed(t, make=lambda a: a.double()), c), RequestError, "has dtype float64, expected bfloat16"),
    (lambda t, c: (changed(t, make=lambda a: a.to(torch.int8)), c), RequestError, "has dtype int8, expected bfloat16"),
    (lambda t, c: (changed(t, make=lambda a: a * float("nan")), c), AdapterError, "tensors: tensor .* has NaN"),
    (lambda t, c: (changed(t, make=lambda a: a * 0 + 70000), c), AdapterError, "magnitudes of 65536 or more"),
    (lambda t, c: (changed(t, make=lambda a: a[:, :-1]), c), AdapterError, "another base"),
    (lambda t, c: (changed(t, make=lambda a: a[:-1]), c), AdapterError, "rank|expected"),
    (lambda t, c: (dict(list(t.items())[1:]), c), AdapterError, "but no lora_"),
    (lambda t, c: ({**t, "base_model.model.model.norm.extra": torch.ones(3)}, c), AdapterError, "is not LoRA A or B"),
    (lambda t, c: (t, {**c, "unheard_of": 3}), AdapterError, "config: unknown field 'unheard_of'"),
    (lambda t, c: (t, {**c, "r": 5}), AdapterError, "has rank 4, but config has 5"),
    (lambda t, c: (t, {**c, "peft_type": "VERA"}), AdapterError, "peft_type 'VERA'"),
    (lambda t, c: (t, {**c, "use_dora": True}), AdapterError, "config has use_dora = True"),
    (lambda t, c: (t, {"lora_alpha": object()}), RequestError, "config cannot be written as JSON"),
    (lambda t, c: (t, "adapter_config.json"), RequestError, "config must be a dict"),
    (lambda t, c: ({}, c), RequestError, "tensors must be a dict of 1 to"),
    (lambda t, c: ({"a": [1.0]}, c), RequestError, "'a' must be a name with a torch tensor"),
]


@pytest.mark.parametrize(("make", "error", "text"), BAD)
def test_bad_input_leaves_the_old_version(llm, adapters, make, error, text):
    tensors, config = stored(adapters[0])
    llm.update_adapter("policy", tensors, config)
    before, names = answers(llm, "policy"), llm.adapters
    with pytest.raises(error, match=text):
        llm.update_adapter("policy", *make(tensors, config), inflight="switch")
    assert llm.adapters == names and answers(llm, "policy") == before


def test_limits_and_arguments(llm, base, adapters):
    tensors, config = stored(adapters[0])
    with pytest.raises(AdapterError, match=r"adapter 'policy': .* rank 24, above the limit of 16: .*max_lora_rank=24"):
        llm.update_adapter("policy", *stored(adapters[4]))
    for name in ("a@3", "a b", "", 7):
        with pytest.raises(RequestError, match="must be 1 to 128 letters"):
            llm.update_adapter(name, tensors, config)
    for version in (0, -1, True, 1.5, 1 << 40):
        with pytest.raises(RequestError, match=r"version=.* must be an integer from 1 to"):
            llm.update_adapter("policy", tensors, config, version=version)
    with pytest.raises(RequestError, match="inflight='later' must be 'pin' or 'switch'"):
        llm.update_adapter("policy", tensors, config, inflight="later")
    assert not llm.adapters and answers(llm, None)
    with LLM(base.path, **{name: value for name, value in OPTIONS.items() if "lora" not in name}) as without:  # noqa: SIM117
        with pytest.raises(RequestError, match="started without adapters"):
            without.update_adapter("policy", tensors, config)


def test_alora_cannot_switch(llm, base):
    invocation = {"alora_invocation_tokens": [7, 8, 9]}
    (path,) = tiny_adapters(base, [AdapterSpec(rank=4, targets=("q_proj",), extra=invocation)])
    with pytest.raises(RequestError, match=r"aLoRA.*inflight='pin'"):
        llm.update_adapter("policy", *stored(path), inflight="switch")
    assert not llm.adapters
    llm.update_adapter("policy", *stored(path))
    llm.add_adapter("file", path)
    policy, file, without = answers(llm, "policy", "file", None, prompt=[1, 2, 7, 8, 9, 3, 4])
    assert policy == file != without


def test_the_child_process_describes_updates(base, adapters):
    config = LlamaConfig.from_directory(base.path)
    describer = AdapterDescriber()
    try:
        registry = AdapterRegistry(config, 16, describe=describer, base=base.path)
        source = AdapterUpdate(*stored(adapters[1]), "pin")
        with private_update(source.nbytes, source.copy) as file:
            update = registry.with_hash(registry.add_version("policy", file))
        expected = load_adapter(adapters[1], config, 16)
        assert update.content_hash == expected.content_hash
        read = registry.read(update.number)
        for module, pair in expected.tensors.items():
            assert all(map(torch.equal, pair, read.tensors[module]))
        source = AdapterUpdate(*stored(adapters[4]), "pin")
        with private_update(source.nbytes, source.copy) as file:  # noqa: SIM117
            with pytest.raises(AdapterError, match="above the limit of 16"):
                registry.add_version("policy", file)
    finally:
        describer.close()
