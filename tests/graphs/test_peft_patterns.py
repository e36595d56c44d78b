"""Module matching: the same verdicts as PEFT's own functions and as Python's re, and no pattern that runs for hours."""

import random
import re

import pytest
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.peft_patterns import (
    MAX_PATTERNS,
    LookAroundError,
    PatternError,
    PeftPatterns,
)

MODULES = LlamaConfig(
    320, 128, 256, num_hidden_layers=12, num_attention_heads=2, num_key_value_heads=2, head_dim=64
).linear_modules()
PATTERNS = [
    "q_proj",
    "proj",
    ".*proj",
    "self_attn.q_proj",
    r"layers\.1\..*",
    "layers.1.mlp.up_proj",
    r"layers\.\d+\.mlp\.(gate|up)_proj",
    "mlp.*",
    ".*",
    "^model.layers.0.self_attn.k_proj",
    "model.layers.11.self_attn.o_proj",
    "1.mlp.down_proj",
    "up_proj|down_proj",
    "o_proj$",
    "_proj",
    r"[0-4]\.self_attn\.[qk]_proj",
]
TARGETS = [
    ["q_proj", "v_proj"],
    ["mlp.up_proj"],
    ["model.layers.3.mlp.up_proj", "k_proj"],
    ["proj"],
    [],
    r".*\.(q|k)_proj",
    r"model\.layers\.[0-3]\..*",
    "q_proj",
    ["0.self_attn.q_proj", "o_proj"],
]


def test_patterns_pick_the_first_match_as_peft_does() -> None:
    from peft.utils.other import get_pattern_key

    dice = random.Random(0)
    for _ in range(60):
        patterns = {pattern: index for index, pattern in enumerate(dice.sample(PATTERNS, dice.randint(0, 5)))}
        for module in MODULES:
            assert PeftPatterns().first_match(patterns, module, None) == patterns.get(
                get_pattern_key(list(patterns), module)
            ), (
                patterns,
                module,
            )


@pytest.mark.parametrize("target_modules", TARGETS, ids=str)
def test_targets_are_peft_s(target_modules: list[str] | str) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    by_layer = (
        [{}]
        if isinstance(target_modules, str)
        else [
            {},
            {"layers_to_transform": 3},
            {"layers_to_transform": [0, 11]},
            {"layers_to_transform": []},
            {"layers_to_transform": [1], "layers_pattern": "layers"},
            {"layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
            {"layers_to_transform": [1], "layers_pattern": "blocks"},
        ]
    )
    for exclude in (None, ["q_proj"], ["layers.1.mlp.up_proj"], r".*layers\.2\..*"):
        for layers in by_layer:
            config = LoraConfig(target_modules=target_modules, exclude_modules=exclude, **layers)
            for module in MODULES:
                try:
                    theirs = (
                        bool(check_target_module_exists(config, module))
                        and type(check_target_module_exists(config, module)).__name__ != "_ExcludedModule"
                    )
                except UnboundLocalError:  # PEFT's own slip when no layers_pattern matches: it means "not this module"
                    theirs = False
                ours = PeftPatterns().targeted(
                    module, target_modules, exclude, layers.get("layers_to_transform"), layers.get("layers_pattern")
                )
                assert ours == theirs, (module, exclude, layers)


def test_all_linear_is_every_projection() -> None:
    assert all(PeftPatterns().targeted(module, "all-linear", None, None, None) for module in MODULES)


# What `re` needs years for with module names of this length.
RUNAWAY = [
    ".?" * 120 + "Z",
    "(a+)+$",
    "(.*)*x",
    "(a|a)*b",
    "(.|.)*Z",
    r"(?:(?:\w+)\.)+Z",
    "(.{1,9}){1,9}Z",
    ".*" * 40 + "Z",
    "(?:.*_)?" * 60 + "Z",
]
REFUSED = [
    "(" * 3000,
    "(",
    "a" * 5000,
    r"(a)\1",
    "(?P<a>x)(?P=a)",
    "(?>a)",
    "a++",
    "(?(1)a|b)",
    r"q_proj\Z",
    ".{1,1000}{1,1000}",
    "(.{0,30}){0,30}x",
    "a{,3}",
    "[[:alpha:]]",
    r"\pL",
    "é",
    "\udc80",
    "a\nb",
    "a\0",
]


@pytest.mark.parametrize("pattern", RUNAWAY, ids=lambda pattern: pattern[:20])
def test_no_pattern_runs_away(pattern: str) -> None:
    """It is judged at all: `re` would still be at the first module when the tests are given up."""
    patterns = PeftPatterns()
    assert not any(patterns.targeted(module, pattern, None, None, None) for module in MODULES)
    assert all(patterns.first_match({pattern: 1}, module, 0) == 0 for module in MODULES)


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: ascii(pattern[:20]))
def test_what_a_linear_matcher_does_not_do_alike_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="list the modules by name") as caught:
        PeftPatterns().compile(pattern)
    assert not isinstance(caught.value, LookAroundError) and len(str(caught.value)) < 200


@pytest.mark.parametrize("pattern", ["(?!.*x)y", ".*(?=q)q", "(?<=a)b", "^(model)(?!.*(lm_head|wte)).*"])
def test_looking_around_is_told_apart(pattern: str) -> None:
    with pytest.raises(LookAroundError, match="look-ahead or look-behind"):
        PeftPatterns().compile(pattern)


def test_patterns_are_bounded_together() -> None:
    patterns = PeftPatterns()
    table = {f".*.*.*.*.*Z{index}": 8 for index in range(MAX_PATTERNS + 1)}
    with pytest.raises(PatternError, match=f"more than {MAX_PATTERNS} patterns"):
        patterns.first_match(table, MODULES[0], 0)
    with pytest.raises(PatternError, match="too complex in total"):
        PeftPatterns().first_match({f".{{100}}{index}": 8 for index in range(1000)}, MODULES[0], 0)
    assert PeftPatterns().first_match({module: index for index, module in enumerate(MODULES)}, MODULES[-1], None) == 83


def test_long_lists_of_names_take_one_look_a_module() -> None:
    names = frozenset({f"layers.{index}.x" for index in range(100_000)} | {"11.mlp.down_proj"})
    assert [module for module in MODULES if PeftPatterns().targeted(module, names, None, None, None)] == MODULES[-1:]


ATOMS = [
    "model",
    "layers",
    r"\.",
    ".",
    r"\d",
    r"\d+",
    "[0-9]",
    "[^.]",
    "[^.]*",
    r"\w+",
    "self_attn",
    "mlp",
    "proj",
    "_",
    ".*",
    ".*?",
]


def test_random_patterns_agree_with_re() -> None:
    """Small ones, which `re` can do."""
    dice, seen = random.Random(1), 0
    for _ in range(400):
        parts = [dice.choice(ATOMS) for _ in range(dice.randint(1, 6))]
        for _ in range(dice.randint(0, 2)):
            place = dice.randrange(len(parts))
            parts[place] = dice.choice(["({})", "(?:{})?", "(?:{}|gate)", "(?i:{})", r"\b{}", "{}$", "^{}"]).format(
                parts[place]
            )
        pattern = "".join(parts)
        ours, theirs = PeftPatterns().compile(pattern, groups=True), re.compile(pattern)
        for module in MODULES[::5]:
            for how in ("match", "fullmatch"):
                found, expected = getattr(ours, how)(module), getattr(theirs, how)(module)
                assert (found and found.groups()) == (expected and expected.groups()), (pattern, module)
                seen += expected is not None
    assert seen > 300


def test_a_layers_pattern_with_alternatives_names_no_layer() -> None:
    """`a|layers` is not grouped in PEFT's own pattern: its left half has no number."""
    assert not PeftPatterns().targeted(MODULES[0], ["q_proj"], None, 0, "model|layers")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|k_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
        r"model\.layers\.(\d+)\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj",
        r"(.*\.)?(layers\.(1|2|3)\..*)$",
    ],
)
def test_patterns_that_people_use_pass(pattern: str) -> None:
    assert PeftPatterns().compile(pattern).fullmatch("model.layers.1.self_attn.q_proj")
