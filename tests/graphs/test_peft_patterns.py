"""Module matching: the same verdicts as PEFT's own functions, and no pattern that runs for hours."""

import random

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.peft_patterns import PatternError, compile_pattern, first_match, targeted

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
    dice = random.Random(0)
    for _ in range(60):
        patterns = {pattern: index for index, pattern in enumerate(dice.sample(PATTERNS, dice.randint(0, 5)))}
        for module in MODULES:
            assert first_match(patterns, module, None) == patterns.get(get_pattern_key(list(patterns), module)), (
                patterns,
                module,
            )


@pytest.mark.parametrize("target_modules", TARGETS, ids=str)
def test_targets_are_peft_s(target_modules: list[str] | str) -> None:
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
                ours = targeted(
                    module, target_modules, exclude, layers.get("layers_to_transform"), layers.get("layers_pattern")
                )
                assert ours == theirs, (module, exclude, layers)


def test_all_linear_is_every_projection() -> None:
    assert all(targeted(module, "all-linear", None, None, None) for module in MODULES)


RUNAWAY = [
    "(a+)+$",
    "(.*)*x",
    "(a|a)*b",
    r"(?:(?:\w+)\.)+q",
    "(?x) (a+) +",
    "(a+)(?#c)+",
    "(a{1,30}){1,30}",
    ".*.*.*.*.*.*.*x",
]
BROKEN = ["(" * 3000, "(", "a" * 5000]


@pytest.mark.parametrize("pattern", [*RUNAWAY, *BROKEN], ids=lambda pattern: pattern[:20])
def test_runaway_and_broken_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="list the modules by name"):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|k_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
        r"model\.layers\.(\d+)\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj",
        r"(.*\.)?(layers\.(1|2|3)\..*)$",
    ],
)
def test_patterns_that_people_use_pass(pattern: str) -> None:
    assert compile_pattern(pattern).fullmatch("model.layers.1.self_attn.q_proj")
