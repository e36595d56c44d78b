"""The report on the real model: its figures are judged by the limits, next to those of bf16."""

import math
from math import nan

from msgspec.structs import replace
from sidestream.tools.quality.divergence import Divergence
from sidestream.tools.quality.real.judgement import judgements, verdict
from sidestream.tools.quality.real.measure import Findings, Measured
from sidestream.tools.quality.real.report import section


def read(adapter: str, kl: float, top_1: float, ratio: float) -> Divergence:
    return Divergence(adapter, 4, 900, (kl,) * 3, (10 * kl,) * 3, (top_1,) * 3, (ratio,) * 3)


def findings(**arms: list[Divergence]) -> Findings:
    measured = [Measured(name.replace("_", "-"), "as it is", found) for name, found in arms.items()]
    return Findings("a model", ["sql", "law"], "a GPU", {}, 900, 4, "0" * 64, 1.0, measured)


BF16 = [read("base", 0.0012, 0.975, 1.0003), read("sql", 0.0014, 0.9742, 1.0012), read("law", 0.0013, 0.977, 1.0019)]


def test_each_reader_is_judged_next_to_what_bf16_has_there() -> None:
    """The limits: mean KL <= 0.0040, top-1 >= 96.0%, perplexity ratio <= 1.003, none of them lower for an adapter."""
    auto = [read("base", 0.004, 0.96, 1.003), read("sql", 0.0045, 0.9599, 1.0029), read("law", 0.0039, 0.97, 1.0087)]
    found = findings(bf16=BF16, int8_auto=auto, int8=[read("base", 0.0066, 0.954, 1.0056)])
    said = verdict(found)
    assert "base model keeps all three, with mean KL 0.0040 [0.0012], top-1 96.00% [97.50%] and perplexity 1.00" in said
    assert (
        "`sql` misses mean KL 0.0045 [0.0014] and top-1 95.99% [97.42%]; `law` misses perplexity 1.0087 [1.0019]."
        in said
    )
    assert "mean KL 0.0066 [0.0012], and 0 of 3 limits kept" in said
    assert [(row[0], row[1], row[-1]) for row in judgements(found).rows[1:]] == [
        ("int8-auto", "base", "none"),
        ("int8-auto", "sql", "mean KL, top-1"),
        ("int8-auto", "law", "perplexity"),
        ("int8", "base", "all three"),
    ]
    assert judgements(found).rows[2][2:8] == ("0.0045", "0.0014", "95.99%", "97.42%", "1.0029", "1.0012")


def test_how_a_mean_kl_and_a_perplexity_go_together_is_told_where_enough_was_read() -> None:
    """Half of them 0.001 above e^KL and half 0.002 above, so 0.0015 on average; one far from bf16 does not count."""
    read_by_many = [read(f"a{i}", 0.003, 0.97, math.exp(0.003 + (0.001, 0.002)[i % 2])) for i in range(20)]
    found = findings(bf16=read_by_many, fp8=[read("base", 0.02, 0.9, 1.5)])
    note = judgements(found).note
    assert "the 20 readings with a mean KL below 0.01 the two differ by 0.0015 on average" in note
    assert "standard deviation of 0.0005" in note
    assert "a mean KL of 0.0040 is expected to have a perplexity of 1.0040 times" in note
    assert "readings" not in judgements(findings(bf16=read_by_many[1:], fp8=[read("base", 0.02, 0.9, 1.5)])).note


def test_a_limit_that_is_missed_by_less_than_a_digit_is_not_shown_as_kept() -> None:
    near = [read("base", 0.00401, 0.95999, 1.00304)]
    said = verdict(findings(bf16=BF16, int8_auto=near))
    assert "misses mean KL 0.004010 [0.0012], top-1 95.9990% [97.50%] and perplexity 1.003040 [1.0003]" in said
    assert "[" not in verdict(findings(int8_auto=near)), "without bf16 its own distance is not known"


def test_without_adapters_and_peers_the_report_says_what_there_is() -> None:
    found = replace(findings(bf16=BF16[:1], int8=[read("base", 0.0066, nan, 1.0056)]), adapters=[])
    found = replace(found, arms=[*found.arms, Measured("fp8", "e4m3", [], problem="no such kernel")])
    text = section(found, "p.svg")
    assert "fp8 did not run: no such kernel." in text and "| bf16 | 0.0012 |  | 97.50% |  | 1.0003 |  |" in text
    assert "peer" not in text
