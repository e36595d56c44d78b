"""Limits on the figures of the real model, next to bf16's figures."""

from math import nan

from msgspec.structs import replace
from sidestream.tools.eval.divergence import Divergence
from sidestream.tools.eval.real.measure import ArmFigures, Findings
from sidestream.tools.eval.real.report import limits_table, report


def read(adapter: str, kl: float, top_1: float, ratio: float) -> Divergence:
    return Divergence(adapter, 4, 900, (kl,) * 3, (10 * kl,) * 3, (top_1,) * 3, (ratio,) * 3)


def findings(**arms: list[Divergence]) -> Findings:
    measured = [ArmFigures(name.replace("_", "-"), "as it is", found) for name, found in arms.items()]
    return Findings("a model", ["sql", "law"], "a GPU", {}, 900, 4, "0" * 64, 1.0, measured)


BF16 = [read("base", 0.0012, 0.975, 1.0003), read("sql", 0.0014, 0.9742, 1.0012), read("law", 0.0013, 0.977, 1.0019)]


def test_each_reader_is_judged_next_to_bf16() -> None:
    """The limits: mean KL <= 0.0040, top-1 >= 96.0%, perplexity ratio <= 1.003."""
    auto = [read("base", 0.004, 0.96, 1.003), read("sql", 0.0045, 0.9599, 1.0029), read("law", 0.0039, 0.97, 1.0087)]
    found = findings(bf16=BF16, int8_auto=auto, int8=[read("base", 0.0066, 0.954, 1.0056)])
    assert [(row[0], row[1], row[-1]) for row in limits_table(found).rows[1:]] == [
        ("int8-auto", "base", "none"),
        ("int8-auto", "sql", "mean KL, top-1"),
        ("int8-auto", "law", "perplexity"),
        ("int8", "base", "mean KL, top-1, perplexity"),
    ]
    assert limits_table(found).rows[2][2:8] == ("0.0045", "0.0014", "95.99%", "97.42%", "1.0029", "1.0012")


def test_a_limit_that_is_missed_by_less_than_a_digit_is_not_shown_as_kept() -> None:
    near = [read("base", 0.00401, 0.95999, 1.00304)]
    row = limits_table(findings(bf16=BF16, int8_auto=near)).rows[1]
    assert row[2:8] == ("0.004010", "0.0012", "95.9990%", "97.50%", "1.003040", "1.0003")
    assert limits_table(findings(int8_auto=near)).rows[1][3] == "", "bf16 was not measured"


def test_without_adapters_the_report_has_the_base_model() -> None:
    found = replace(findings(bf16=BF16[:1], int8=[read("base", 0.0066, nan, 1.0056)]), adapters=[])
    found = replace(found, arms=[*found.arms, ArmFigures("fp8", "e4m3", [], problem="no such kernel")])
    text = report(found)
    text = " ".join(text.split())
    assert "for the base model, compared" in text and "fp8 did not run: no such kernel." in text
