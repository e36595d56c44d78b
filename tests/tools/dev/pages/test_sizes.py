"""docs/quickstart.md says what a Llama takes, as the engine counts it."""

import re

from sidestream.tools.dev.pages.excerpts import TABLE
from sidestream.tools.dev.pages.sizes import LLAMAS, PAGE, RANK, sizes
from sidestream.tools.options.models import LLAMA_8B


def shown() -> str:
    (table,) = (found["text"] for found in TABLE.finditer(PAGE.read_text()) if found["name"] == "sizes")
    return table


def test_the_smallest_model_s_row_is_what_the_engine_counts() -> None:
    name = next(iter(LLAMAS))
    assert sizes([name]).splitlines()[-1] in shown(), "run `python -m sidestream.tools.dev.pages.sizes --write`"


def test_every_row_is_what_its_config_implies() -> None:
    """Counted by hand: parameters, one byte each in a linear, two in an embedding; keys and values of one byte."""
    for name, given in LLAMAS.items():
        each = {**LLAMA_8B, **given}
        hidden, layers, heads = each["hidden_size"], each["num_hidden_layers"], each["num_key_value_heads"]
        query, key = each["num_attention_heads"] * each["head_dim"], heads * each["head_dim"]
        linears = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
        linears += [(hidden, each["intermediate_size"])] * 3
        embedding = each["vocab_size"] * hidden
        inner = layers * sum(a * b for a, b in linears)
        copies = 1 if each["tie_word_embeddings"] else 2
        row = re.search(rf"\| {name} \| (.*) GB \| (.*) GB \| (.*) MB \| (.*) MB \|", shown())
        assert row is not None
        checkpoint, weights, cache, slot = map(float, row.groups())
        assert abs(checkpoint - 2e-9 * (inner + copies * embedding)) < 0.06
        assert abs(weights - 1e-9 * (inner + 3 * embedding)) < 0.06  # the head in int8 is a copy of its own
        assert abs(cache - 1e-3 * layers * heads * 2 * each["head_dim"]) < 0.07 * cache  # and their scales
        assert slot > 1e-6 * layers * RANK * sum(a + b for a, b in linears)
