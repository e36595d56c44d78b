"""Shapes of the evaluation model and of its adapters."""

from tokenizers import Tokenizer

from ..train.adapter_training import ALL_LINEAR, ATTENTION, AdapterRecipe, LlamaConfig
from .train_data import BOS, EOS

BASE_NAME = "sidestream-quality"

# Named after their tasks; together they cover the options of common adapters.
ADAPTERS = {
    "arithmetic": AdapterRecipe(16, 16, ALL_LINEAR, effort=0.5),  # training on digits alone makes it forget text
    "sorting": AdapterRecipe(16, 32, ATTENTION),
    "strings": AdapterRecipe(16, 16, ALL_LINEAR, rslora=True),
    "programs": AdapterRecipe(64, 128, ["q_proj", "v_proj", "up_proj", "down_proj"], effort=1.2),
    "json": AdapterRecipe(
        16,
        32,
        ALL_LINEAR,
        effort=1.1,
        rank_pattern={"q_proj": 32, "down_proj": 8},
        alpha_pattern={"q_proj": 32, "down_proj": 16},
    ),
    "retrieval": AdapterRecipe(8, 16, ATTENTION, effort=4.5),  # texts of 32k tokens need more steps
}


def model_config(tokenizer: Tokenizer, smoke: bool = False) -> LlamaConfig:
    """Return a Llama of 30M parameters: head_dim 128, grouped queries, tied embeddings, 40k positions."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256 if smoke else 512,
        intermediate_size=512 if smoke else 1536,
        num_hidden_layers=2 if smoke else 9,
        num_attention_heads=2 if smoke else 4,
        num_key_value_heads=1 if smoke else 2,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
    )
