"""`StructuredOutputsParams`: vLLM's spellings, one constraint at a time, sizes first."""

import json

import pytest
from sidestream import RequestError, SamplingParams, StructuredOutputsParams

DEEP: dict = {"type": "string"}
for _ in range(70):
    DEEP = {"items": DEEP}
DEEPER: dict = {"type": "string"}
for _ in range(5000):
    DEEPER = {"items": DEEPER}

REFUSED = [
    ({}, "exactly one of json, regex, choice, grammar, json_object; this has none"),
    ({"regex": "a", "choice": ["b"]}, "this has regex, choice"),
    ({"structural_tag": "{}"}, "structural_tag is not supported; use grammar"),
    ({"json": {}, "disable_additional_properties": True}, "write additionalProperties: false"),
    ({"json": "{"}, "structured_outputs.json is not JSON"),
    ({"json": "[]"}, "must be a JSON schema, not a list"),
    ({"json": "null"}, "must be a JSON schema, not a NoneType"),
    ({"json": False}, "json is false, which no answer matches"),
    ({"json": " false\n"}, "json is false, which no answer matches"),
    ({"json": True, "regex": "a"}, "this has json, regex"),
    ({"json": {"enum": [{1, 2}]}}, "is not JSON"),
    ({"json": {"minimum": float("nan")}}, "is not JSON"),
    ({"json": DEEP}, "nested deeper than 64 levels"),
    ({"json": DEEPER}, "nested deeper than 64 levels"),
    ({"json": "[" * 100_000}, "nested deeper than 64 levels"),
    ({"json": {"description": "x" * 300_000}}, "at most 262144 are allowed"),
    ({"json": '"' + "x" * 300_000}, "at most 262144 are allowed"),
    ({"regex": ""}, "regex must be a non-empty text"),
    ({"regex": "é" * 140_000}, "structured_outputs.regex has 280000 bytes"),
    ({"grammar": 3}, "grammar must be a non-empty text"),
    ({"choice": []}, "choice must be a list of strings"),
    ({"choice": "yes"}, "choice must be a list of strings"),
    ({"choice": ["a", ""]}, "each must be a non-empty text"),
    ({"choice": ["a"] * 5000}, "choice has 5000 entries; at most 4096"),
    ({"json_object": "yes"}, "json_object='yes' must be True or False"),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern needs json or json_object"),
    ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "contradicts"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**fields)


def test_what_is_taken():
    schema = {"type": "object", "properties": {"é": {"type": "string"}}}
    as_dict, as_text = StructuredOutputsParams(json=schema), StructuredOutputsParams(json=json.dumps(schema))
    assert json.loads(as_dict.text) == json.loads(as_text.text) == schema and as_dict.kind == "json"
    for anything in (True, "true", " true ", {}, "{}"):
        assert json.loads(StructuredOutputsParams(json=anything).text) == {}
    assert StructuredOutputsParams(json=True).kind == "json"
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    assert StructuredOutputsParams(json_object=True, disable_fallback=True).kind == "json_object"
    assert StructuredOutputsParams(None, "[a-z]+").kind == "regex", "the order of vLLM's fields"
    params = SamplingParams(structured_outputs={"regex": "a+"})
    assert params.constraint == StructuredOutputsParams(regex="a+") and params.clone() == params
    assert SamplingParams(structured_outputs=None) == SamplingParams()
    with pytest.raises(RequestError, match="its fields are json, regex"):
        SamplingParams(structured_outputs={"jsn": {}})
    with pytest.raises(RequestError, match="must be StructuredOutputsParams, not str"):
        SamplingParams(structured_outputs="a+")
