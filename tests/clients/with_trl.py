"""Run TRL: AsyncGRPO with LoRA on the CPU, 20 steps with a new adapter after each; the reward grows.

TRL sends no API key and passes adapters as directories, so it gets a server of its own. The trainer insists on an
installed vLLM, a CUDA device and FlashAttention 3; `without_gpu` replaces these places. HTTP calls are unchanged.
"""

import sys
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import httpx
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

TESTS = Path(__file__).parents[1]
MODEL = str(TESTS.parent / "tools" / "demo_model")
STEPS, STALENESS = 20, 2
# questions that the model was not trained on: its answers vary, and so do their rewards
QUESTIONS = ("What is the meaning of life?", "What is the capital of the moon?", "Tell me a story.", "Write a poem.")


def share_of_a(completions: list, **_: object) -> list[float]:
    """Return the share of the letter "a" in each answer, in a process of the trainer's."""
    texts = [messages[0]["content"] for messages in completions]
    return [text.count("a") / max(len(text), 1) for text in texts]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *_: object,
    softmax_scale: float,
    **__: object,
) -> torch.Tensor:
    """Return causal attention per segment, as `flash_attn_varlen_func` does: a segment's queries are its last keys."""
    outputs = []
    for i in range(len(starts_q) - 1):
        queries, keys = (slice(starts[i], starts[i + 1]) for starts in (starts_q, starts_k))
        q, k, v = query[queries].transpose(0, 1), key[keys].transpose(0, 1), value[keys].transpose(0, 1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        output = scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=softmax_scale, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def without_gpu() -> None:
    """Let the trainer run without vLLM installed, a CUDA device and FlashAttention 3."""
    async_rollout_worker.is_vllm_available = vllm_client.is_vllm_available = lambda: True
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    torch.set_num_threads(1)  # the server computes on the same cores
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)


def train(url: str, output: Path) -> AsyncGRPOTrainer:
    """Train a new adapter against the server; return the trainer."""
    config = AsyncGRPOConfig(
        str(output),
        vllm_server_base_url=url,
        use_cpu=True,
        bf16=False,  # as the server, so that log-probabilities can be compared
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_staleness=STALENESS,
        max_completion_length=24,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # how an answer ends, which TRL knows for the chat templates of large models only
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "fields": {"content": {"close_pattern": tokenizer.eos_token}},
    }
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in QUESTIONS]})
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = AsyncGRPOTrainer(MODEL, share_of_a, config, rows, tokenizer, peft_config=lora)
    trainer.train()
    return trainer


def check_policy(url: str, name: str, directory: Path, tokenizer: AutoTokenizer) -> None:
    """Compare the server's log-probabilities of an answer with those of transformers and peft."""
    prompt = tokenizer(tokenizer.bos_token + QUESTIONS[0], add_special_tokens=False)["input_ids"]
    body = {"model": name, "prompt": prompt, "max_tokens": 24, "logprobs": 0, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status().json()["choices"][0]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), directory)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer["token_ids"]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer["token_ids"])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer["logprobs"]["token_logprobs"]), expected, atol=1e-3, rtol=0)


def check_teacher(url: str) -> None:
    """Compare the 100 likeliest tokens that TRL's distillation asks a teacher for with those of transformers."""
    sequence, prompt_length = list(range(40, 60)), 5
    scores = VLLMClient(url).get_sequence_logprobs([sequence], [prompt_length])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)(torch.tensor([sequence])).logits[0]
    expected = logits[prompt_length - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(torch.tensor(scores["logprobs"][0]), expected.topk(100).values, atol=1e-3, rtol=0)
    own = expected.gather(1, torch.tensor(sequence[prompt_length:])[:, None])
    found = torch.tensor(scores["actual_logprobs"][0])
    torch.testing.assert_close(found.where(found.isfinite(), own), own, atol=1e-3, rtol=0)


def main() -> None:
    """Start a server, train, and check what both have at the end."""
    sys.path.append(str(TESTS))
    from support.live_server import serving

    without_gpu()
    output = Path.cwd() / "policies"
    output.mkdir()
    flags = ["--allow-adapter-loading", "--adapter-root", str(output), "--max-loras", str(STALENESS + 2)]
    flags += ["--max-logprobs", "100"]
    with serving(*flags) as server:
        trainer = train(server.url, output)
        steps = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert len(steps) == trainer.state.global_step == STEPS
        assert not [entry for entry in steps if "rollout/vllm_retry_total" in entry]
        # the first answers are of the policy that is trained: the server's log-probabilities are the trainer's
        assert abs(steps[0]["ratio"] - 1) < 1e-4, steps[0]
        rewards = [entry["reward"] for entry in steps]
        assert mean(rewards[-5:]) > mean(rewards[:3]), rewards
        # a policy is loaded before the first step and after each; those too old for a sample are unloaded
        models = {each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]}
        last = STEPS + 1
        assert {name for name in models if name.startswith("trl-")} == {
            f"trl-policy-v{version}" for version in range(last - STALENESS, last + 1)
        }
        name = f"trl-policy-v{last}"
        check_teacher(server.url)
        check_policy(server.url, name, output / ".vllm_lora" / name, trainer.processing_class)


if __name__ == "__main__":
    main()
