"""Receipts: true ones are answered again to the bit, altered ones are found out."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import json as fast_json
from msgspec import structs
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.request import Continuation, Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from sidestream.runtime.protocol.messages import Sampling
from sidestream.runtime.receipts import base_hash as hashing
from sidestream.runtime.receipts.base_hash import base_hash
from sidestream.runtime.receipts.receipt import (
    MAX_BYTES,
    ReceiptMaker,
    hash_of_ids,
    is_signed_by,
    mac_of,
    parse_receipt,
    read_key,
    split_sampling,
)
from sidestream.tools.cli import main
from sidestream.tools.commands.replay import DIFFERS, SAME, UNKNOWN, answer_again
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

KEY = b"0123456789abcdef0123456789abcdef"
OPTIONS = {"device": "cpu", "precision": "fp32", "max_model_len": 256, "show_progress": False}
FLAGS = ["--device", "cpu", "--precision", "fp32", "--max-model-len", "256"]
SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}


@dataclass
class Made:
    """A model with two adapters in this process, and receipts of its answers as a server would make them."""

    base: TinyBase
    adapters: dict[str, Path]
    llm: LLM
    maker: ReceiptMaker

    def answer(self, ids: list[int], params: SamplingParams, adapter: str | None) -> tuple[dict[str, Any], Any]:
        """Return a receipt and the output that it is of."""
        (output,) = self.llm.generate([ids], params, adapter, use_tqdm=False)
        content = (
            "" if adapter is None else self.llm.registry.by_number(self.llm.registry.numbers[adapter]).content_hash
        )
        return self.maker.make(params, content, output), output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    base = tiny_llama(tmp_path_factory.mktemp("receipts"), tokenizer=True, num_key_value_heads=1, **SMALL)
    adapters = dict(zip("ab", tiny_adapters(base, [AdapterSpec(rank=4, alpha=32)] * 2), strict=True))
    with LLM(base.path, adapters={name: str(path) for name, path in adapters.items()}, **OPTIONS) as llm:
        maker = ReceiptMaker(KEY, "0.0", lambda: bytes(range(16)))
        maker.base, maker.device, maker.numerics = base_hash(base.path), "cpu", llm.model.numerics
        yield Made(base, adapters, llm, maker)


def sampled(source: random.Random) -> SamplingParams:
    """Return random parameters."""
    return SamplingParams(
        n=source.choice([1, 1, 3]),
        temperature=source.choice([0.0, 0.7, 1.0, 1.3]),
        top_p=source.choice([1.0, 0.9]),
        top_k=source.choice([0, 20]),
        min_p=source.choice([0.0, 0.05]),
        seed=source.choice([None, source.randrange(-(1 << 60), 1 << 60)]),
        max_tokens=source.randrange(1, 12),
        min_tokens=source.choice([0, 1]),
        stop=source.choice([None, ["e", "qu"]]),
        stop_token_ids=source.choice([None, [7, 19]]),
        ignore_eos=source.random() < 0.5,
        logprobs=source.choice([None, 0, 3]),
        presence_penalty=source.choice([0.0, 0.5]),
        repetition_penalty=source.choice([1.0, 1.2]),
        logprob_token_ids=source.choice([None, None, [3, 9]]),
        receipt=True,
    )


def test_true_receipts_are_answered_again_and_altered_ones_found_out(made: Made, pytestconfig: pytest.Config) -> None:
    count = 200 if pytestconfig.getoption("--exhaustive") else 20
    source = random.Random(3)
    for _ in range(count):
        adapter = source.choice([None, "a", "b"])
        ids = [source.randrange(made.llm.config.vocab_size) for _ in range(source.randrange(1, 100))]
        params = sampled(source)
        content, _ = made.answer(ids, replace(params, receipt=False), adapter)
        text = json.dumps(content)
        receipt = parse_receipt(text.encode())
        assert is_signed_by(receipt, KEY)
        findings = answer_again(receipt, made.llm, ids)
        assert {state for _, state, _ in findings} == {SAME}, (findings, params)

        place = source.randrange(len(text))
        altered = text[:place] + source.choice('0123456789abcdef"}. x') + text[place + 1 :]
        try:
            other = parse_receipt(altered.encode())
        except ValueError:
            pass
        else:
            assert other == receipt or not is_signed_by(other, KEY), altered

        number = source.randrange(len(receipt.outputs))  # of a forger with the key
        output = structs.replace(receipt.outputs[number], sha256=hash_of_ids([*ids, 1]))
        outputs = [output if index == number else each for index, each in enumerate(receipt.outputs)]
        forged = structs.replace(receipt, outputs=outputs)
        forged = structs.replace(forged, mac=mac_of(forged, KEY))
        assert [field for field, state, _ in answer_again(forged, made.llm, ids) if state == DIFFERS] == ["outputs"]


def test_other_log_probabilities_other_numerics_and_hidden_parameters(made: Made) -> None:
    ids = [5, 6, 7, 8]
    receipt = parse_receipt(json.dumps(made.answer(ids, SamplingParams(seed=1, logprobs=0), "a")[0]).encode())
    other = structs.replace(receipt, outputs=[structs.replace(receipt.outputs[0], logprobs="0" * 64)])
    assert [field for field, state, _ in answer_again(other, made.llm, ids) if state != SAME] == ["logprobs"]
    many = structs.replace(receipt, sampling=structs.replace(receipt.sampling, logprobs=100))
    assert answer_again(many, made.llm, ids)[-1][1] == SAME, "whatever the limits of the server were"
    wrong = structs.replace(receipt, outputs=[structs.replace(receipt.outputs[0], sha256="0" * 64)])
    for change in ({"numerics": "0" * 64}, {"device": "cuda"}):
        found = answer_again(structs.replace(wrong, **change), made.llm, ids)
        assert found[-1][1] == UNKNOWN, "roundings may explain it"
        assert answer_again(structs.replace(receipt, **change), made.llm, ids)[-1][1] == SAME
    content, _ = made.answer(ids, SamplingParams(logit_bias={5: -10.0}, bad_words=["secret"]), "a")
    assert "secret" not in json.dumps(content) and len(content["hidden"]) == 64
    assert answer_again(parse_receipt(json.dumps(content).encode()), made.llm, ids)[-1][1] == UNKNOWN
    schema = {"type": "object", "properties": {"secret": {"type": "string"}}}
    for first, second, same in (
        ({"logit_bias": {5: 1.0, 6: 2.0}}, {"logit_bias": {6: 2.0, 5: 1.0}}, True),
        ({"structured_outputs": {"json": schema}}, {"structured_outputs": {"regex": "secret"}}, False),
        ({"allowed_token_ids": [5, 6]}, {"allowed_token_ids": [5, 7]}, False),
    ):
        split = [split_sampling(SamplingParams(temperature=0.5, **each)) for each in (first, second)]
        assert (split[0] == split[1]) is same and split[0][0] == split[1][0] == Sampling(temperature=0.5)


def test_an_answer_that_another_engine_began_is_replayed_only_with_a_seed(made: Made) -> None:
    ids, earlier = [5, 6, 7, 8], Continuation([9, 10], 0)
    for seed in (None, 3):
        params = SamplingParams(seed=seed, max_tokens=6, logprobs=0)
        made.llm.engine.add(Request(f"continued {seed}", None, ids, params, continues=(earlier,)), stream=True)
        finished: list[Any] = []
        while not finished:
            finished = made.llm.engine.step()[1]
        receipt = parse_receipt(json.dumps(made.maker.make(params, "", finished[0])).encode())
        assert receipt.outputs[0].seed == seed and receipt.outputs[0].logprobs == ""
        assert (answer_again(receipt, made.llm, ids)[-1][1] == UNKNOWN) is (seed is None)


@pytest.fixture(scope="module")
def files(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("files")

    def write(name: str, content: Any, mode: int = 0o600) -> Path:
        path = folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        path.chmod(mode)
        return path

    return write


def test_exit_codes_of_the_command(
    made: Made, files: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = made.llm.tokenizer
    assert tokenizer is not None
    text = "the quick brown fox"
    ids = tokenizer.encode(text, True)
    content, output = made.answer(ids, SamplingParams(temperature=1.0, seed=4, max_tokens=12), "a")
    whole = str(files("response.json", {"choices": [], "sidestream_receipt": content}))
    prompt, key = str(files("prompt.txt", text + "\n")), str(files("key", KEY.decode()))
    answer = str(files("answer.txt", output.outputs[0].text))
    paths = [str(made.adapters["b"]), str(made.adapters["a"])]
    base = str(made.base.path)

    def replay(*arguments: str) -> tuple[int, dict[str, str]]:
        code = main(["replay", *arguments, *FLAGS])
        lines = capsys.readouterr().out.splitlines()
        return code, {line[:10].strip(): line[10:].partition(":")[0] for line in lines}

    code, found = replay(whole, base, "--adapter", *paths, "--prompt", prompt, "--answer", answer, "--receipt-key", key)
    assert code == 0 and found == dict.fromkeys(("mac", "base", "prompt", "adapter", "outputs", "answer"), "same")
    listed = str(files("answer.json", output.outputs[0].token_ids))
    code, found = replay(whole, base, "--prompt", prompt, "--answer", listed)
    assert code == 2 and found["adapter"] == "cannot tell" and found["mac"] == "note" and found["answer"] == "same"
    assert replay(whole, base, "--adapter", *paths)[0] == 2, "there is no prompt"
    code, found = replay(whole, base, "--adapter", paths[0], "--prompt", prompt)
    assert code == 1 and found["adapter"] == "differs"
    code, found = replay(whole, base, "--prompt", str(files("other.txt", text + "es")))
    assert code == 1 and found["prompt"] == "differs"
    code, found = replay(whole, base, "--answer", str(files("other.json", [1, 2, 3])))
    assert code == 1 and found["answer"] == "differs"
    code, found = replay(whole, base, "--receipt-key", str(files("other key", "f" * 32)))
    assert code == 1 and found == {"mac": "differs"}
    other = tiny_llama(tmp_path, num_key_value_heads=1, **SMALL | {"intermediate_size": 128})
    code, found = replay(whole, str(other.path), "--prompt", str(files("ids.json", ids)))
    assert code == 1 and found["base"] == "differs"
    assert main(["replay", whole, str(other.path), "--prompt", prompt, *FLAGS]) == 2
    assert "has no tokenizer; give token ids as JSON" in capsys.readouterr().err


def test_what_is_no_receipt_ends_with_one_line(
    made: Made, files: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    content, _ = made.answer([5, 6, 7], SamplingParams(), None)
    text = json.dumps(content)
    wrong = {
        "truncated": text[:-20],
        "too large": text + " " * MAX_BYTES,
        "not a number": text.replace(f'"time": {content["time"]}', '"time": NaN'),
        "infinite": text.replace('"sampling": {', '"sampling": {"top_p": 1e999, '),
        "a path as an id": json.dumps(content | {"instance": "../../../../etc/passwd"}),
        "a path as a hash": json.dumps(content | {"adapter": "/etc/passwd"}),
        "another version": json.dumps(content | {"v": 2}),
        "another field": json.dumps(content | {"note": "true"}),
        "no outputs": json.dumps(content | {"outputs": []}),
        "deep": "[" * 100_000,
        "a list": json.dumps([content]),
    }
    for name, altered in wrong.items():
        path = files("wrong.json", altered)
        assert main(["replay", str(path), str(made.base.path)]) == 2, name
        printed = capsys.readouterr()
        assert not printed.out and printed.err.count("\n") == 1 and "RECEIPT" in printed.err, (name, printed.err)
    assert main(["replay", str(path.parent / "absent.json"), str(made.base.path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_receipt_has_no_text_no_path_and_no_name(made: Made) -> None:
    params = SamplingParams(stop=["a secret stop"], bad_words=["a secret word"], allowed_token_ids=[5, 6, 7])
    content, output = made.answer([5, 6, 7], params, "a")
    text = json.dumps(content)
    assert not any(hidden in text for hidden in ("secret", str(made.base.path), "adapters", "[5, 6, 7]"))
    assert len(text) < 1500 and output.outputs[0].text not in text
    assert parse_receipt(fast_json.encode(content)) == parse_receipt(json.dumps(content, indent=4).encode())


def test_keys_that_are_refused(files: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    for name, content, mode in (
        ("short", "0123", 0o600),
        ("long", "0" * 5000, 0o600),
        ("open", "0" * 32, 0o644),
    ):
        with pytest.raises(ValueError, match="16 to 4096 bytes that only you can read; make one: openssl"):
            read_key(str(files(name, content, mode)))
    with pytest.raises(ValueError, match="cannot be read"):
        read_key("/absent/key")
    assert read_key(str(files("right", KEY.decode() + "\n"))) == KEY
    for flags, problem in (
        (["--receipts"], "--receipts needs a key"),
        (["--receipt-key", "/absent"], "cannot be read"),
    ):
        assert main(["serve", "--no-http", *flags]) == 2 and problem in capsys.readouterr().err


def test_an_llm_in_this_process_makes_none(made: Made) -> None:
    with pytest.raises(RequestError, match="receipt=True needs a server"):
        made.llm.generate([[5]], SamplingParams(receipt=True), use_tqdm=False)


def test_the_hash_of_the_base_is_remembered_until_a_file_changes(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "cache"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((made.base.path / name).read_bytes())
    read: list[str] = []
    hashed = hashing._file_hash

    def counted(stopped: Any, path: Path) -> str:
        read.append(path.name)
        return hashed(stopped, path)

    monkeypatch.setattr(hashing, "_file_hash", counted)
    first = base_hash(tmp_path)
    assert first == base_hash(tmp_path) == base_hash(made.base.path), "of content, not of paths"
    assert sorted(read) == ["config.json"] * 2 + ["model.safetensors"] * 2, "the second time nothing was read"
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert base_hash(tmp_path) != first
