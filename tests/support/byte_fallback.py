"""A tokenizer.json with byte fallback, as Llama 2, Mistral 7B and Phi-3 mini have one."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "r"), ("▁", "p")]
CHARACTERS = "▁abcdefghijklmnopqrstuvwxyzTP.,!?\né日"


def byte_fallback_tokenizer(path: Path, strip: bool = True) -> Tokenizer:
    """Saves one with few characters in its vocabulary as a file. `strip`: its decoder drops the space that its encoder
    puts in front of a text.
    """
    made = ["".join(pair) for pair in MERGES]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS, *made]
    model: Any = models.BPE
    tokenizer = Tokenizer(
        model(
            vocab={name: number for number, name in enumerate(names)},
            merges=MERGES,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    first: Any = "first" if strip else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=first, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("▁本")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path))
    return tokenizer
