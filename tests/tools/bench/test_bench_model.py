"""What it writes can be served."""

import json

import sidestream
from sidestream.runtime.text.tokenizer import load_tokenizer
from sidestream.tools.bench.random_model import TINY, write_model, write_tokenizer


def test_a_model_with_adapters(tmp_path):
    adapters = write_model(tmp_path / "model", TINY, 3, 4)
    llm = sidestream.LLM(
        str(tmp_path / "model"),
        adapters,
        load_format="dummy",
        device="cpu",
        precision="fp32",
        max_model_len=64,
        show_progress=False,
    )
    params = sidestream.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate(["Hi there"], params, adapter="random-1", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6 and output.prompt_token_ids == list(b"Hi there")


def test_a_large_vocabulary(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json", 128256)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == 128256 == len(set(vocabulary.values()))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.encode("aé") == list("aé".encode())
