"""Tiny checkpoints of Llama and other families, PEFT adapters for them, and the logits that transformers and peft
compute: the oracle.

base = tiny_llama(tmp_path, num_key_value_heads=1)
math, poetry = tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=16, use_rslora=True)])
oracle_logits(base, math, [1, 2, 3])     # [3, V] fp32
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # seconds of imports that most runs of single tests do without
    from transformers import PreTrainedModel

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "initializer_range": 0.1,  # attention far from uniform, logits around +-1
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass
class TinyBase:
    """A checkpoint on disk at `path`, written by transformers; `model` is transformers' own fp32 model of it."""

    path: Path
    _adapted: dict[str, torch.nn.Module] = field(default_factory=dict, repr=False)

    @cached_property
    def model(self) -> "PreTrainedModel":
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager").eval()

    def adapted(self, adapter: Path) -> torch.nn.Module:
        """The base with one PEFT adapter applied (unmerged), cached."""
        from peft import PeftModel

        key = str(adapter)
        if key not in self._adapted:
            self._adapted[key] = PeftModel.from_pretrained(copy.deepcopy(self.model), key).eval()
        return self._adapted[key]


@dataclass(frozen=True)
class AdapterSpec:
    """What `tiny_adapters` asks of peft; `extra` goes to LoraConfig as it is."""

    rank: int = 8
    alpha: float = 16
    targets: Sequence[str] | str = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def tiny_llama(directory: Path, **options: Any) -> TinyBase:
    """`tiny_model` of a Llama."""
    return tiny_model(directory, "Llama", **options)


def tiny_model(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    tokenizer: bool = False,
    **overrides: Any,
) -> TinyBase:
    """Saves a random model of a family (as transformers spells it: "Llama", "Qwen2") under `directory`/base and returns
    it. `overrides`: transformers' config fields.

    `max_shard_size="200KB"` makes a sharded checkpoint; `tokenizer=True` writes a byte-level tokenizer.json next to it
    (ids 0-255 = bytes, 256 = <s>, 257 = </s>).
    """
    import transformers

    path = Path(directory) / "base"
    config = getattr(transformers, f"{family}Config")(**{**TINY, **overrides})
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)  # a norm weight of one would hide a forgotten one
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)  # and so would a bias of zero
    torch.random.set_rng_state(generator_state)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        write_tokenizer(path)
    return TinyBase(path)


def tiny_adapters(base: TinyBase, specs: Sequence[AdapterSpec], *, seed: int = 1) -> list[Path]:
    """Saves one PEFT adapter per spec next to the base (B is random, not zero) and returns their directories."""
    from peft import LoraConfig, get_peft_model

    paths = []
    for index, spec in enumerate(specs):
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=spec.rank,
            lora_alpha=spec.alpha,
            use_rslora=spec.use_rslora,
            rank_pattern=dict(spec.rank_pattern),
            alpha_pattern=dict(spec.alpha_pattern),
            target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
            **spec.extra,
        )
        generator = torch.Generator().manual_seed(seed * 1000 + index)
        model = get_peft_model(copy.deepcopy(base.model), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_magnitude_vector" in name:  # far from the norms of the base's rows
                    parameter.mul_(torch.exp(torch.randn(parameter.shape, generator=generator) * 0.5))
                elif name.endswith("bias") and (parameter.requires_grad or "lora_B" in name):
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
                elif "lora_A" in name or "lora_B" in name:
                    fan_in = parameter.shape[1]
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 / fan_in**0.5)
        path = base.path.parent / f"adapter{len(list(base.path.parent.glob('adapter*')))}"
        model.save_pretrained(path)
        paths.append(path)
    return paths


@torch.no_grad()
def oracle_logits(base: TinyBase, adapter: Path | None, token_ids: Sequence[int]) -> torch.Tensor:
    """fp32 logits [len(token_ids), V] of the whole sequence, from transformers (and peft when there is an adapter)."""
    model = base.model if adapter is None else base.adapted(adapter)
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


@torch.no_grad()
def oracle_greedy(base: TinyBase, adapter: Path | None, token_ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that greedy decoding appends (end-of-sequence ignored)."""
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(int(oracle_logits(base, adapter, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE without merges: token id = byte value, 256 = <s>, 257 = </s>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
