"""Constraints become masks for any tokenizer, and hopeless ones become errors in bounded time."""

import io
import json
import random
import re
from pathlib import Path

import jsonschema
import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sidestream import RequestError, StructuredOutputsParams
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.text.generation_config import eos_token_ids
from sidestream.runtime.text.reasoning import ANY_ANSWER
from sidestream.runtime.text.structured import trial, trial_process
from sidestream.runtime.text.structured.grammar_compiler import GrammarCompiler
from sidestream.runtime.text.structured.mask_filling import consume_outputs
from sidestream.runtime.text.structured.matcher import Matcher
from sidestream.runtime.text.structured.trial import is_plain
from sidestream.runtime.text.tokenizer import load_tokenizer
from support.masks import allowed_in, fill_masks, num_allowed
from support.pieces import sentencepiece_model

FOX = "The quick brown fox jumps over the lazy dog."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["fast", "piece"])
def model(request, tmp_path_factory):
    """(compiler, tokenizer, the tokens that end a text), for a vocabulary larger than the tokenizer's."""
    if request.param == "fast":
        tokenizer, ends, size = load_tokenizer(Path(DEMO_MODEL)), eos_token_ids(Path(DEMO_MODEL)), 600
    else:
        directory = sentencepiece_model(tmp_path_factory.mktemp("piece"), [FOX] * 200 + [json.dumps(PERSON), "yes no"])
        tokenizer, ends, size = load_tokenizer(directory), frozenset({2}), 400
    compiler = GrammarCompiler(tokenizer, size, ends)
    yield compiler, tokenizer, ends
    compiler.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A trial may wait for a processor; tests of its limit set their own."""
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 60.0)


def walk(matcher: Matcher, ends: frozenset[int], seed: int, most: int = 300) -> list[int]:
    """Tokens drawn from the masks until the answer may end."""
    chance, tokens = random.Random(seed), []
    for _ in range(most):
        consume_outputs([matcher], [(tokens, 0)], in_parallel=False)
        (mask,) = fill_masks([matcher])
        choices = allowed_in(mask)
        assert choices and not matcher.failed
        if ends & set(choices):
            return tokens
        tokens.append(chance.choice(choices))
    raise AssertionError("the answer does not end")


def test_tokens_of_the_masks_spell_what_was_asked_for(model):
    compiler, tokenizer, ends = model
    grammar = compiler.compile(StructuredOutputsParams(json=PERSON, disable_any_whitespace=True))
    for seed in range(8):
        tokens = walk(grammar.matcher(), ends, seed)
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), PERSON)
    pattern = "(yes|no)-[0-9é]{2,4}x"
    for seed in range(8):
        tokens = walk(compiler.compile(StructuredOutputsParams(regex=pattern)).matcher(), ends, seed)
        assert regex.fullmatch(pattern, tokenizer.decode(tokens))
    assert grammar.words == len(fill_masks([grammar.matcher()])[0])


def test_a_state_follows_from_the_tokens(model):
    """A matcher that has seen all tokens at once, as after a new start, allows the same as one that followed."""
    compiler, _, ends = model
    grammar = compiler.compile(StructuredOutputsParams(json=PERSON))
    assert compiler.compile(StructuredOutputsParams(json=json.dumps(PERSON))) is grammar, "compiled once"
    followed = grammar.matcher()
    tokens = walk(followed, ends, 3)
    again = grammar.matcher()
    for count in (len(tokens) // 2, len(tokens)):
        consume_outputs([again], [([7, 7, *tokens[:count]], 2)], in_parallel=False)
    fresh = [grammar.matcher() for _ in range(3)]
    consume_outputs(fresh, [(tokens, 0)] * 3, in_parallel=True)
    masks = fill_masks([followed, again, *fresh])
    assert (masks == masks[0]).all() and followed.accepting
    wrong = grammar.matcher()
    consume_outputs([wrong], [([tokens[-1]] * 9, 0)], in_parallel=False)
    assert wrong.failed and "cannot be used" in wrong.problem()


def test_plain_schemas_need_no_trial_and_others_have_one(model, monkeypatch):
    compiler, _, _ = model
    tried = []
    original = trial.Trial.grammar
    monkeypatch.setattr(trial.Trial, "grammar", lambda self, *args: tried.append(args[0]) or original(self, *args))
    compiler.compile(StructuredOutputsParams(json={**PERSON, "title": "plain"}))
    compiler.compile(StructuredOutputsParams(choice=["a", 'b"\n', "é"]))
    assert tried == []
    compiler.compile(StructuredOutputsParams(json={"type": "string", "pattern": "^a+$"}))
    assert tried == ["json"]
    for risky in (
        {"multipleOf": 3}, {"maxLength": 10**6}, {"pattern": "a"}, {"allOf": [{}]}, {"anyOf": [{}], "properties": {}},
        {"properties": {"x": {"items": {"not": {}}}}}, {"minimum": 10**300}, {"items": [1]}, {"unknown": 1},
    ):  # fmt: skip
        assert not is_plain(json.dumps(risky)), risky


def test_hopeless_constraints_are_one_error(model, monkeypatch):
    compiler, _, _ = model
    for constraint, expected in (
        ({"json": {"type": "integer", "multipleOf": 999983}}, "it takes more than 0.5 s to compile"),
        ({"json": {"type": "string", "allOf": [{"pattern": f"a{n}.*b{n}"} for n in range(20)]}}, "to compile|too much"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: x"}, "x"),
    ):
        (kind,) = constraint
        monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.5 if kind == "json" else 60.0)
        with pytest.raises(RequestError, match=f"structured_outputs.{kind} cannot be used: .*({expected})"):
            compiler.compile(StructuredOutputsParams(**constraint))
    assert compiler.compile(StructuredOutputsParams(regex="a+b")), "the child process was started again"


LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
ODD = [
    ({"json": {**LOOP, "$ref": "#/$defs/a"}}, "no text fits it"),
    ({"json": {"allOf": [{"$ref": "#"}]}}, "no text fits it"),
    ({"json": {"anyOf": [False, False]}}, "Unsatisfiable"),
    ({"json": {"$ref": 7}}, "Expected string|must be a string"),
    ({"json": {"$ref": "https://example.com/schema"}}, "not present in a registry"),
    ({"json": '{"enum": ["\\udc00"]}'}, "hex escape"),
    ({"json": {"const": "\udc00"}}, "not JSON serializable"),
    ({"json": {"oneOf": [{"minimum": 1}, {"type": "integer"}]}}, r"oneOf .*\. Use anyOf in its place"),
    ({"json": {"pattern": "a<b(?!c)d", "type": "string"}}, "a<b.*look-around"),
    ({"json": {"type": "string"}, "whitespace_pattern": "<[a"}, "<.*unclosed character class"),
    ({"regex": "x<(?<=a)y"}, "x<.*look-around"),
    ({"regex": "[^\\s\\S]"}, "no text fits it"),
    ({"regex": "\udc00"}, "surrogates not allowed"),
    ({"choice": ["a", "\udfff"]}, "surrogates not allowed"),
    ({"grammar": 'start: "a" <nope> "b"'}, "<nope>"),
    ({"grammar": "start: b\nb: c\nc: b"}, "no text fits it"),
    ({"grammar": "root ::= root root"}, "no text fits it"),
    ({"grammar": 'begin: "a"'}, "a Lark grammar needs a rule `start: ...`, GBNF a rule `root ::= ...`"),
    ({"grammar": 'x ::= "a"'}, "No 'root' rule found"),
    ({"grammar": "%llguidance 5"}, "start|%llguidance"),
]


@pytest.mark.parametrize(("constraint", "expected"), ODD, ids=[str(constraint) for constraint, _ in ODD])
def test_whatever_llguidance_raises_on_is_an_error_with_its_reason(model, constraint, expected):
    compiler, _, _ = model
    with pytest.raises(
        RequestError, match=f"structured_outputs.{next(iter(constraint))} cannot be used: .*{expected}"
    ) as error:
        compiler.compile(StructuredOutputsParams(**constraint))
    assert trial.is_refusal(str(error.value))
    assert not re.search("non-verbose|NoExtensionBias|coerce_one_of|\n", str(error.value))


@pytest.mark.parametrize("text", ["null", "[1,{}]", '{"a":[true,"b"]}', "-1.5"])
def test_true_is_any_json(model, text):
    compiler, tokenizer, _ = model
    matcher = compiler.compile(StructuredOutputsParams(json="true", disable_any_whitespace=True)).matcher()
    mark = "\u2402"  # takes the space that a text's first word gets
    tokens = tokenizer.encode(mark + text, False)[len(tokenizer.encode(mark, False)) :]
    consume_outputs([matcher], [(tokens, 0)], in_parallel=False)
    assert matcher.accepting


@pytest.mark.parametrize("grammar", ['?start: "a"', '  !start : "a"', '// x ::= y\nstart: "a"', '# ::=\nroot\t::= "a"'])
def test_notations_of_a_grammar_are_recognized(model, grammar):
    compiler, tokenizer, ends = model
    tokens = walk(compiler.compile(StructuredOutputsParams(grammar=grammar)).matcher(), ends, 0)
    assert tokenizer.decode(tokens).strip() == "a"


def test_choices_may_hold_any_character(model):
    compiler, tokenizer, ends = model
    for choice in ("\x7f", "\x00\u2028", '"\\', "\n|", "\U0010ffff"):
        tokens = walk(compiler.compile(StructuredOutputsParams(choice=[choice])).matcher(), ends, 0)
        assert tokenizer.decode(tokens) == choice


def test_a_panic_is_an_error(model, monkeypatch):
    """It is no Exception: neither the child process nor a server's thread may end by it."""
    compiler, _, _ = model

    class PanicError(BaseException):
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicError("index out of bounds")

    monkeypatch.setattr(trial_process, "grammar_of", panic)
    line = json.dumps({"kind": "regex", "text": "q", "options": {}, "limits": {}, "steps": 1, "seconds": 1.0})
    output = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(line + "\n"))
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setattr(trial_process.resource, "setrlimit", lambda *_: None)
    trial_process.main()
    assert json.loads(output.getvalue().splitlines()[1]) == {"error": "index out of bounds"}
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "_source", panic)
    with pytest.raises(RequestError, match=r"structured_outputs\.regex cannot be used: index out of bounds"):
        compiler.compile(StructuredOutputsParams(regex="qqq"))


@settings(max_examples=50, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(name=st.text(st.characters(exclude_characters="\x7f"), max_size=9), age=st.integers(0, 99))
def test_what_fits_a_schema_is_allowed(model, name, age):
    """The masks are not too narrow either."""
    compiler, tokenizer, _ = model
    text = json.dumps({"name": name, "age": age}, ensure_ascii=False)
    matcher = compiler.compile(StructuredOutputsParams(json=PERSON)).matcher()
    before = tokenizer.encode("\n", False)  # after it no space is put before the text
    tokens = tokenizer.encode("\n" + text, False)[len(before) :]
    consume_outputs([matcher], [(tokens, 0)], in_parallel=False)
    assert matcher.accepting


@pytest.mark.parametrize("model", ["fast"], indirect=True)
@pytest.mark.parametrize("most", [0, 1, 2, 5, 9])
def test_the_reasoning_ends_after_so_many_tokens(model, most):
    """The closer is forced, also where the text looks like one, and the constraint follows."""
    compiler, tokenizer, ends = model
    thoughts = ["x y z w v u t s r q p", "a <b <c </t d </think e < f <", "<think>a b c d e f g h i j k l m"]
    for start, before in (("inside", ""), ("optional", "<think>"), ("optional", "\n<think>")):
        for constraint, answer in (({"json_object": True}, "{}"), ({"grammar": ANY_ANSWER}, "Ahoy </think> <b")):
            params = StructuredOutputsParams(**constraint, reasoning=start, reasoning_tokens=most)
            for thought in thoughts:
                matcher = compiler.compile(params).matcher()
                matcher.consume(tokenizer.encode(before, add_special_tokens=False))
                wanted, free, forced = tokenizer.encode(thought, add_special_tokens=False), [], ""
                while wanted[len(free)] in (allowed := allowed_in(fill_masks([matcher])[0])):
                    free.append(wanted[len(free)])
                    matcher.consume(free[-1:])
                while "</think>" not in tokenizer.decode(free) + forced:
                    byte = min(allowed, key=lambda token: len(tokenizer.token_bytes(token)))
                    forced += tokenizer.token_bytes(byte).decode()
                    matcher.consume([byte])
                    allowed = allowed_in(fill_masks([matcher])[0])
                assert not matcher.failed and forced and "</think>".endswith(forced)
                end = (tokenizer.decode(free) + forced).index("</think>")
                count = sum(len(tokenizer.decode(free[: place + 1])) <= end for place in range(len(free)))
                exact = most - (start == "inside" and most == 1)
                assert count == exact or (count < exact and "<" in thought[: end + 1]), (start, thought)
                rest = [*tokenizer.encode(answer, add_special_tokens=False), min(ends)]
                assert num_allowed(matcher, rest) == len(rest), (constraint, thought)
    if most > 8:
        early = [*tokenizer.encode("a</think>{}", add_special_tokens=False), min(ends)]
        params = StructuredOutputsParams(json_object=True, reasoning="inside", reasoning_tokens=most)
        assert num_allowed(compiler.compile(params).matcher(), early) == len(early)
    params = StructuredOutputsParams(grammar=ANY_ANSWER, reasoning="optional", reasoning_tokens=most)
    tokens = tokenizer.encode("No <think>, and no limit on this, as long as it may be", add_special_tokens=False)
    assert num_allowed(compiler.compile(params).matcher(), tokens) == len(tokens)


@pytest.mark.parametrize("model", ["fast"], indirect=True)
@pytest.mark.parametrize(
    ("constraint", "answer", "other"),
    [
        ({"json": PERSON}, '{"name": "Ann", "age": 7}', '{"nome'),
        ({"json_object": True}, "{}", "[1]"),
        ({"regex": "a+/b"}, "aa/b", "ab"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
        ({"grammar": 'start: A "z"\nA: /b+/'}, "bbz", "bz!"),
        ({"grammar": 'root ::= "x" | "y"'}, "y", "yy"),
    ],
)
def test_a_constraint_begins_after_the_reasoning(model, constraint, answer, other):
    compiler, tokenizer, ends = model

    def fed(start: str, text: str) -> bool:
        matcher = compiler.compile(StructuredOutputsParams(**constraint, reasoning=start)).matcher()
        tokens = [*tokenizer.encode(text, add_special_tokens=False), min(ends)]
        return num_allowed(matcher, tokens) == len(tokens)

    thought = f"\nIs it {other}? </thin k> {{ </think>\n\n"
    for start, before in (("inside", thought), ("optional", "<think>" + thought), ("optional", ""), ("none", "")):
        assert fed(start, before + answer), (start, before)
        assert not fed(start, before + other), (start, before)
    assert not fed("none", "<think>" + thought + answer)
    assert not fed("inside", "<think>never closed") and not fed("optional", thought + answer)
