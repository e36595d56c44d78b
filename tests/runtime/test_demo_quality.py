"""FP8 next to bf16 on the demo model, teacher-forced on questions and answers of every adapter: the stated bounds of
the default configuration.
"""

import random
from pathlib import Path

import pytest
import sidestream
import torch
from sidestream.compiler.options import CompileOptions
from sidestream.tools.eval.demo_facts import STYLES, facts
from support.compiled import CompiledRunner
from support.paged import Chunk, plain_model
from support.tiny import TinyBase
from tokenizers import Tokenizer
from torch.nn.functional import kl_div, log_softmax

DEMO = Path(sidestream.__file__).parent / "tools" / "demo_model"
TEXTS_A_STYLE = 24
MEAN_KL, TOP_1 = 2e-3, 0.97  # of every adapter, and of the base model


def texts(style: str) -> list[str]:
    dice = random.Random(style)
    return [dice.choice(fact.questions) + fact.answer(style) for fact in dice.sample(facts(), TEXTS_A_STYLE)]


def logits(
    model: torch.nn.Module, options: CompileOptions, token_ids: dict[str, list[list[int]]]
) -> dict[str, torch.Tensor]:
    """style -> logits of every token, all styles and texts in one batch."""
    chunks = [Chunk(0, tokens, STYLES.index(style) - 1) for style in STYLES for tokens in token_ids[style]]
    chunks = [Chunk(row, chunk.tokens, chunk.adapter) for row, chunk in enumerate(chunks)]
    parts = CompiledRunner(model, options, len(chunks), blocks=3).step(chunks)  # type: ignore[arg-type]
    return {
        style: torch.cat(parts[place * TEXTS_A_STYLE : (place + 1) * TEXTS_A_STYLE])
        for place, style in enumerate(STYLES)
    }


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    token_ids = {style: [tokenizer.encode(text).ids for text in texts(style)] for style in STYLES}
    model, _ = plain_model(TinyBase(DEMO), [DEMO / "adapters" / style for style in STYLES[1:]], torch.bfloat16)
    return logits(model, CompileOptions(precision="bf16"), token_ids), logits(
        model, CompileOptions(precision="fp8"), token_ids
    )


@pytest.mark.parametrize("style", STYLES)
def test_fp8_answers_as_bf16_does(both: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]], style: str) -> None:
    want, got = both[0][style], both[1][style]
    kl = float(kl_div(log_softmax(got, -1), log_softmax(want, -1), log_target=True, reduction="batchmean"))
    same = float((got.argmax(-1) == want.argmax(-1)).float().mean())
    assert 1e-9 < kl <= MEAN_KL, f"mean KL {kl:.2e} over {len(want)} tokens"
    assert same >= TOP_1, f"top-1 agreement {same:.3f}"
