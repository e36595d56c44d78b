"""`sidestream serve` from the command line on a real (tiny) model, against transformers and peft."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq
from msgspec import structs
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.client.client import Client
from sidestream.runtime.protocol.messages import ListAdapters, LoadAdapter, Sampling, UnloadAdapter
from support.serving import Server
from support.tiny import AdapterSpec, oracle_greedy, oracle_logits, tiny_adapters, tiny_llama

GREEDY = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("served"), tokenizer=True)


@pytest.fixture(scope="module")
def adapters(base):
    specs = [
        AdapterSpec(rank=4),
        AdapterSpec(rank=8, use_rslora=True),
        AdapterSpec(rank=8, targets=("q_proj", "down_proj")),
        AdapterSpec(rank=2),
    ]
    return dict(zip(("first", "second", "third", "later"), tiny_adapters(base, specs), strict=True))


@pytest.fixture(scope="module")
def server(base, adapters, tmp_path_factory) -> Iterator[Server]:
    """`later` is not given; two slots for three adapters."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with tempfile.TemporaryDirectory(prefix="sst-") as directory:
        os.chmod(directory, 0o700)
        config = Path(directory) / "server.toml"
        modules = "\n".join(f'{name} = "{adapters[name]}"' for name in ("first", "second", "third"))
        config.write_text(
            f'model = "{base.path}"\ndevice = "cpu"\nprecision = "fp32"\nmax-num-seqs = 7\nmax_model_len = '
            f"256\nmax-logprobs = -1\n[lora-modules]\n{modules}\n"
        )
        command = [
            sys.executable,
            "-m",
            "sidestream.tools.cli",
            "serve",
            "--no-http",
            "--config",
            str(config),
            "--max-num-seqs",
            "4",
            "--max-num-batched-tokens",
            "48",
            "--bind",
            f"ipc://{directory}/e.sock",
            "--max-loras",
            "2",
            "--num-kv-pages",
            "9",
            "--max-lora-rank",
            "8",
            "--kv-host-gb",
            "0.02",
            "--kv-disk",
            f"{directory}/pages",
        ]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        with zmq.Context() as context:
            server = Server(process, f"ipc://{directory}/e.sock", log, context)
            yield server
            context.destroy(linger=0)
        if process.poll() is None:
            assert server.stop() == 0


@pytest.fixture
def wire(server):
    with server.connect() as wire:
        yield wire


def test_every_adapter_answers_as_peft_does(server, wire, base, adapters):
    assert wire.welcome is not None and wire.welcome.max_num_seqs == 4, "the command line wins over the file"
    prompts = {
        f"r{index}": [(index * 31 + place * 7) % 256 for place in range(length)]
        for index, length in enumerate((5, 120, 1, 70, 33, 64, 20, 9))
    }
    names = (None, "first", "second", "third")
    chosen = {request: names[index % 4] for index, request in enumerate(prompts)}
    for request, prompt in prompts.items():
        wire.submit(request, GREEDY, prompt_token_ids=prompt, adapter=chosen[request])
    answers = {request: wire.answer(request, 60).token_ids[0] for request in prompts}
    for request, prompt in prompts.items():
        name = chosen[request]
        assert answers[request] == oracle_greedy(base, None if name is None else adapters[name], prompt, 10)
    server.await_text("serving at ipc://")
    log = server.log.read_text()
    assert "576 KV tokens (9 pages), 3 adapters (2 at once), up to 4 requests at once, 256 tokens each" in log


def test_prompts_that_have_left_the_device_come_from_host_memory(server, wire, base, adapters):
    prompts = [[(index * 13 + place * 5) % 256 for place in range(140)] for index in range(6)]
    expected = [oracle_greedy(base, adapters["first"], prompt, 10) for prompt in prompts]
    for turn in range(2):
        for index, prompt in enumerate(prompts):
            wire.submit(f"{turn}-{index}", GREEDY, prompt_token_ids=prompt, adapter="first")
        assert [wire.answer(f"{turn}-{index}", 60).token_ids[0] for index in range(len(prompts))] == expected
    with Client(server.address) as client:
        stats = client.stats()
    assert stats["prefix_host_hits_total"] >= 4 * 128 and stats["host_pages_used"] >= 12
    assert stats["disk_pages_written_total"] >= 12 and stats["disk_failures_total"] == 0


def test_adapters_are_loaded_while_it_serves(wire, base, adapters):
    prompt = [3, 1, 4, 1, 5]
    # before any request: a client that says nothing for some seconds is dropped
    lengths = {"first": 60, "later": 10, "second": 10}
    expected = {name: oracle_greedy(base, adapters[name], prompt, length) for name, length in lengths.items()}
    wire.submit(
        "long", Sampling(temperature=0.0, max_tokens=60, ignore_eos=True), prompt_token_ids=prompt, adapter="first"
    )
    assert type(wire.call(LoadAdapter(1, "late", str(adapters["later"])))).__name__ == "Done"
    wire.submit("late", GREEDY, prompt_token_ids=prompt, adapter="late")
    assert wire.answer("late", 60).token_ids[0] == expected["later"]
    assert wire.answer("long", 60).token_ids[0] == expected["first"]
    assert type(wire.call(LoadAdapter(2, "late", str(adapters["second"]), replace=True))).__name__ == "Done"
    wire.submit("again", GREEDY, prompt_token_ids=prompt, adapter="late")
    assert wire.answer("again", 60).token_ids[0] == expected["second"], "no key or value of the former one is found"
    infos = {info.name: info for info in wire.call(ListAdapters(3)).adapters}
    assert set(infos) == {"first", "second", "third", "late"} and infos["late"].content == infos["second"].content
    assert type(wire.call(UnloadAdapter(4, "late"))).__name__ == "Done"


@pytest.mark.parametrize("damage", ["missing", "cut", "rubbish", "config"])
def test_a_damaged_adapter_is_refused_and_nothing_else_happens(wire, base, adapters, damage):
    source, broken = adapters["later"], adapters["later"].parent / f"broken-{damage}"
    broken.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (broken / name).write_bytes((source / name).read_bytes())
    weights = broken / "adapter_model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "rubbish":
        weights.write_bytes(os.urandom(5000))
    else:
        (broken / "adapter_config.json").write_text("{")
    error = wire.call(LoadAdapter(1, "broken", str(broken)))
    assert error.code == "adapter_error" and str(broken) not in error.message
    wire.submit("after", GREEDY, prompt_token_ids=[1, 2], adapter="first")
    assert wire.answer("after", 60).token_ids[0] == oracle_greedy(base, adapters["first"], [1, 2], 10)


def test_allowed_tokens_and_bad_words(wire, base):
    allowed = list(b"abcdefgh")
    sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True, allowed_token_ids=allowed)
    wire.submit("free", sampling, prompt="Hello")
    text = wire.answer("free", 60).texts[0]
    assert len(text) == 12 and set(text.encode()) <= set(allowed)
    words = [text[3:5], text[8]]
    prompt = torch.tensor([list(b"Hello")])
    theirs = base.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None,
        pad_token_id=0, prefix_allowed_tokens_fn=lambda batch, ids: allowed,
        bad_words_ids=[list(word.encode()) for word in words],
    )  # fmt: skip
    # after the computation: a client that says nothing for some seconds is dropped
    wire.submit("bound", structs.replace(sampling, bad_words=words), prompt="Hello")
    assert wire.answer("bound", 60).token_ids[0] == theirs[0, 5:].tolist()


def test_prompt_logprobs_are_those_of_transformers(server, base, adapters):
    """Also what a client puts together of many chunks, with and without a stream."""
    prompts = [[(place * 37 + 5) % 256 for place in range(length)] for length in (180, 1, 40)]
    names = ["first", None, None]
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=count) for count in (20, 0, -1)
    ]
    with Client(server.address, connect_timeout=60) as client:
        whole = [output.prompt_logprobs for output in client.generate(prompts, params, names)]
        chunks = list(client.stream(prompts[0], params[0], "first"))
        (plain,) = client.generate(prompts[2])
    assert plain.prompt_logprobs is None
    scored = [place for chunk in chunks for place in chunk.prompt_logprobs or ()]
    assert [place[0].token_id for place in scored] == prompts[0][1:]
    for place, entry in zip(scored, whole[0][1:], strict=True):
        assert [token.token_id for token in place] == list(entry)
        assert [token.logprob for token in place] == pytest.approx([each.logprob for each in entry.values()], abs=1e-4)
    assert [chunk.token_ids for chunk in chunks if chunk.prompt_logprobs] == [[]] * 4, "a prompt is scored in pieces"
    for prompt, name, asked, found in zip(prompts, names, params, whole, strict=True):
        assert len(found) == len(prompt) and found[0] is None
        expected = oracle_logits(base, adapters.get(name), prompt).log_softmax(-1)
        for token, row, entry in zip(prompt[1:], expected, found[1:], strict=False):
            count = asked.prompt_logprobs if asked.prompt_logprobs >= 0 else len(row)
            assert set(entry) == {token, *row.topk(count).indices.tolist()}
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert entry[token].rank == int((row > row[token]).sum()) + 1


def test_text_seeds_and_logprobs(wire, base):
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=2, n=2)
    for request in ("one", "two"):
        wire.submit(request, sampling, prompt="Hello there", stream=request == "one")
    one, two = wire.answer("one", 60), wire.answer("two", 60)
    assert one.token_ids == two.token_ids and one.texts == two.texts and one.token_ids[0] != one.token_ids[1]
    for answer in (one, two):
        for index in (0, 1):
            logprobs = [entry for chunk in answer.chunks if chunk.index == index for entry in chunk.logprobs]
            assert [entry[0].token_id for entry in logprobs] == answer.token_ids[index]
            assert all(entry[0].logprob <= 0 and len(entry) in (2, 3) for entry in logprobs)
