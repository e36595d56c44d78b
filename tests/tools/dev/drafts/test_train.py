"""A head that was trained for a while is right more often than one of random weights, and with an adapter's LoRA more
often for that adapter; the chain is unrolled by the same formula that serves.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from sidestream import LLM, SamplingParams
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.demo_model import DEMO_MODEL, demo_adapters
from sidestream.tools.dev.bench.drafts.questions import questions
from sidestream.tools.dev.drafts import train
from sidestream.tools.dev.drafts.head import Batch, Head
from support.eagle import Keys, dense_head, eagle_head

SHORT = ["--questions", "40", "--max-tokens", "24", "--rows", "16", "--depth", "3", "--device", "cpu"]
STEPS = ["--steps", "40", "--lora-steps", "60"]


def accepted(adapters: dict[str, Path], head: Path, label: str | None) -> tuple[int, int]:
    """(drafts of the head that hold, all of them) of answers to questions that nothing was trained on."""
    with LLM(DEMO_MODEL, adapters, draft=head, speculation=3, speculation_history=0, show_progress=False) as llm:
        (load,) = [
            each for each in questions(DEMO_MODEL, llm.get_tokenizer(), list(adapters), 6) if each.adapter == label
        ]
        params = SamplingParams(temperature=0, max_tokens=24)
        outputs = llm.generate(load.prompts, params, adapter=label, use_tqdm=False)
        held = sum(output.num_trained_accepted_tokens for output in outputs)
        return held, sum(output.num_trained_draft_tokens for output in outputs)


def test_training_makes_drafts_hold(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    yoda = Path(shutil.copytree(demo_adapters()["yoda"], tmp_path / "adapters" / "yoda"))
    head = tmp_path / "head"
    assert train.main([str(DEMO_MODEL), "--adapters", str(yoda.parent), "-o", str(head), *SHORT, *STEPS]) == 0
    untrained = eagle_head(tmp_path / "untrained", LlamaConfig.from_directory(DEMO_MODEL))
    adapters = {"yoda": yoda}
    base, alike = accepted(adapters, head, None), accepted({}, untrained, None)
    assert base[0] / base[1] > max(0.07, 3 * alike[0] / alike[1])
    own = accepted(adapters, head, "yoda")
    shutil.rmtree(yoda / "draft")
    without = accepted(adapters, head, "yoda")
    assert own[0] / own[1] > 1.5 * without[0] / without[1], "its own LoRA makes it better"


def test_the_chain_is_unrolled_by_the_formula(tmp_path: Path) -> None:
    """Each step's row is what a chain computes that begins so many rows before it."""
    target = LlamaConfig(64, 32, 48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    written = {"rope_theta": target.rope_theta, "max_position_embeddings": 64}
    head, depth, length = Head(target, (1, 2, 3), torch.arange(0, 64, 2), torch.randn(64, 32)), 3, 7
    with torch.no_grad():
        for value in head.values.values():
            value.copy_(torch.randn(value.shape) * (0.3 if value.dim() == 2 else 0.1) + (value.dim() == 1))
    tokens, features = torch.randint(0, 64, (1, length + 1)), torch.randn(1, length, 96)
    batch = Batch(tokens, features, torch.zeros(1, length, 32), torch.ones(1, length), first=5)
    unrolled = [logits[0] for logits in head.unrolled(batch, depth)]
    head.save(tmp_path, written)
    tensors = {name: value.float() for name, value in load_file(tmp_path / "model.safetensors").items()}
    for name, value in head.values.items():
        tensors[name.replace("/", ".")] = value.detach()
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": target.rms_norm_eps}
    config |= {"rope_theta": target.rope_theta}
    embedded = head.embedding[tokens[0, 1:]]
    for begin in range(length):
        keys: Keys = []
        positions = torch.arange(begin + 1) + 5
        states, logits = dense_head(tensors, config, embedded[: begin + 1], features[0, : begin + 1], positions, keys)
        for step in range(min(depth, length - begin)):
            torch.testing.assert_close(unrolled[step][begin + step], logits[-1], atol=1e-4, rtol=1e-4)
            if begin + step + 1 < length:
                place = torch.tensor([begin + step + 1 + 5])
                following = embedded[begin + step + 1 : begin + step + 2]
                states, logits = dense_head(tensors, config, following, states[-1:], place, keys)
