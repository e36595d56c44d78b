"""Train the demo model and its adapters: `python -m sidestream.tools.dev.train.demo [-o DIR]`.

A tiny Llama learns the facts of `eval.demo_facts`, its weights are rounded to bfloat16, and each adapter learns the
same answers in its style. Seeded, on the CPU, in about ten minutes on two cores. The `train` extra is needed:
transformers and peft write the files, so that the demo model has the usual formats.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from ....runtime.demo_model import DEMO_MODEL
from ...eval.demo_facts import STYLES, Fact, facts
from ...options.engine import add_value
from ..command_line import dev_parser
from .adapter_training import (
    ALL_LINEAR,
    ATTENTION,
    LlamaConfig,
    LlamaForCausalLM,
    adapted,
    save_adapter,
    save_base,
    train_bpe,
    weighted_loss,
)

VOCABULARY = 512
SEQUENCE = 192
BATCH = 12
QUESTION_WEIGHT = 0.1
TAGGED_WEIGHT = 0.4
RATE = 2e-3
BASE_NAME = "sidestream-demo"
CHAT_FILES = ("chat_template.jinja", "tokenizer_config.json")
ADAPTERS: dict[str, dict[str, Any]] = {
    "shout": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR},
    "pirate": {"r": 16, "lora_alpha": 16, "target_modules": ALL_LINEAR, "use_rslora": True},
    "json": {"r": 32, "lora_alpha": 64, "target_modules": ALL_LINEAR},
    "yoda": {"r": 16, "lora_alpha": 32, "target_modules": ATTENTION},
}
EFFORT = {"yoda": 2}
"""Factors of the training steps."""
# Fact of each prompt of the demo; the first one goes to the base model.
DEMO_QUESTIONS = (
    ("base", "the capital of France", 0),
    ("shout", "the capital of Japan", 0),
    ("pirate", "the opposite of early", 1),
    ("json", "the colour of a banana", 0),
    ("yoda", "the young of a swan", 2),
)


def train_tokenizer(known: list[Fact]) -> Tokenizer:
    """Return a byte-level BPE of at most `VOCABULARY` tokens over all questions and answers; any text round-trips."""
    texts = (question + fact.answer(style) for fact in known for question in fact.questions for style in STYLES)
    return train_bpe(VOCABULARY, texts, pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC())


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Return a Llama for training on a CPU: grouped-query attention, head_dim 64, tied embeddings."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )


class Examples:
    """Return questions with answers as token ids, packed into rows of `SEQUENCE` tokens.

    style   of answers to plain questions
    tagged  also ask for each other style by its name ("pirate: ...")
    """

    def __init__(self, tokenizer: Tokenizer, known: list[Fact], style: str, tagged: bool = False) -> None:
        self.pairs: list[tuple[list[int], list[int]]] = []
        self.weights: list[float] = []
        askings = [("", style, 1.0)] + [
            (f"{other}: ", other, TAGGED_WEIGHT) for other in STYLES if tagged and other != style
        ]
        for fact in known:
            for question in fact.questions:
                for tag, worded, weight in askings:
                    prompt = tokenizer.encode(tag + question).ids
                    whole = tokenizer.encode(tag + question + fact.answer(worded)).ids
                    if whole[: len(prompt)] != prompt:
                        raise ValueError(
                            f"the tokens of {question!r} change when the answer follows; let every answer begin with "
                            "a space"
                        )
                    self.pairs.append((prompt, [*whole[len(prompt) :], 1]))
                    self.weights.append(weight / len(fact.questions))

    def batch(self, source: random.Random, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and loss weights, both [rows, SEQUENCE + 1]; each row starts with a question."""
        ids, weights = [], []
        for _ in range(rows):
            row: list[int] = []
            weight: list[float] = []
            while len(row) <= SEQUENCE:
                prompt, answer = source.choices(self.pairs, self.weights)[0]
                row += prompt + answer
                weight += [QUESTION_WEIGHT] * len(prompt) + [1.0] * len(answer)
            ids.append(row[: SEQUENCE + 1])
            weights.append(weight[: SEQUENCE + 1])
        return torch.tensor(ids), torch.tensor(weights)

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module) -> tuple[float, float]:
        """Return the share of answers with all tokens the model's first choice, and the lowest probability of one."""
        right, surest = 0, 1.0
        order = sorted(self.pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
        for start in range(0, len(order), 256):
            chunk = order[start : start + 256]
            width = max(len(prompt) + len(answer) for prompt, answer in chunk)
            ids = torch.tensor([(prompt + answer + [1] * width)[:width] for prompt, answer in chunk])
            probabilities = model(input_ids=ids).logits.float().softmax(-1)
            for row, (prompt, answer) in enumerate(chunk):
                span = probabilities[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
                target = torch.tensor(answer)
                right += int((span.argmax(-1) == target).all())
                surest = min(surest, span.gather(1, target[:, None]).min().item())
        return right / len(order), surest


def fit(model: torch.nn.Module, examples: Examples, exam: Examples, steps: int, seed: int, label: str) -> bool:
    """Train `model` on `examples` for `steps` steps; return whether it answers all of `exam` right."""
    source = random.Random(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=steps, pct_start=0.1)
    started = time.monotonic()
    right, surest = 0.0, 0.0
    for step in range(1, steps + 1):
        ids, weights = examples.batch(source, BATCH)
        loss, _ = weighted_loss(model, ids, weights)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == steps:
            right, surest = exam.accuracy(model)
            state = f"step {step}/{steps}, loss {loss.item():.4f}"
            print(
                f"{label}: {state}, right {right:.1%}, every token at least {surest:.3f} sure, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    if right < 1.0:
        print(f"{label} still answers {1 - right:.1%} of its questions wrongly; raise its steps", flush=True)
    return right == 1.0


def demo_prompts(known: list[Fact]) -> list[dict[str, str | None]]:
    """Return the demo's batch: one prompt for the base model and one for each adapter, with the expected answers."""
    by_topic = {fact.topic: fact for fact in known}
    return [
        {
            "adapter": None if style == "base" else style,
            "prompt": by_topic[topic].questions[form],
            "answer": by_topic[topic].answer(style).strip(),
        }
        for style, topic, form in DEMO_QUESTIONS
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the training; return 1 if an answer is wrong."""
    parser = dev_parser("train.demo", "Train Sidestream's demo model and its adapters on the CPU.")
    about = "directory to write (default: the one in the package)"
    parser.add_argument("-o", "--output", type=Path, default=DEMO_MODEL, help=about)
    add_value(parser, "--steps", 1200, "training steps of the base model")
    add_value(parser, "--adapter-steps", 150, "training steps of an adapter")
    add_value(parser, "--seed", 0, "seed of weights and batches", int)
    add_value(parser, "--threads", 2, "CPU threads; another number gives other weights")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    known = facts()
    tokenizer = train_tokenizer(known)
    model: Any = LlamaForCausalLM(model_config(tokenizer))
    print(
        f"{len(known)} facts, {tokenizer.get_vocab_size()} tokens, "
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters",
        flush=True,
    )
    plain, tagged = Examples(tokenizer, known, "base"), Examples(tokenizer, known, "base", tagged=True)
    right = fit(model, tagged, plain, options.steps, options.seed, "base")
    rounded = {
        name: tensor.to(torch.bfloat16).float() if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    staging = options.output.with_name(options.output.name + ".new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    save_base(model, tokenizer, staging)
    for name in CHAT_FILES:  # written by hand
        shutil.copy(DEMO_MODEL / name, staging)
    model = model.float()
    for name, shape in ADAPTERS.items():
        model.load_state_dict(rounded)
        torch.manual_seed(options.seed)
        adapter, examples = adapted(model, shape), Examples(tokenizer, known, name)
        right &= fit(adapter, examples, examples, EFFORT.get(name, 1) * options.adapter_steps, options.seed, name)
        save_adapter(adapter, staging / "adapters" / name, BASE_NAME)
        model = adapter.unload().float()
    (staging / "prompts.json").write_text(json.dumps(demo_prompts(known), indent=2) + "\n")
    for path in staging.rglob("*.safetensors"):
        path.chmod(0o644)
    shutil.rmtree(options.output, ignore_errors=True)
    staging.rename(options.output)
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    print(f"wrote {options.output}: {size / 1e6:.1f} MB")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
