"""A sentencepiece tokenizer, as Llama 2 has one."""

from collections.abc import Sequence
from pathlib import Path

import sentencepiece


def sentencepiece_model(directory: Path, texts: Sequence[str]) -> Path:
    """Trains a `tokenizer.model` of 300 pieces in a directory, which is returned."""
    (directory / "text").write_text("\n".join(texts), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return directory
