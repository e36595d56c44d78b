"""KubeRay's published schema of a RayService, small enough to lie with the tests, and what a manifest says against it.

`python tests/support/kuberay_schema.py < ray.io_rayservices.yaml > tests/runtime/fleet/rayservice_v1.json` makes the
file of the CRD in KubeRay's repository (ray-operator/config/crd/bases; Apache 2.0): version v1, without descriptions
and status; what is there more than once is written once.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FILE = Path(__file__).parents[1] / "runtime" / "fleet" / "rayservice_v1.json"
WORTH_A_NAME = 120
"""Characters."""


def problems(manifest: dict[str, Any]) -> list[str]:
    """What the schema does not take: `where: why`. A field that it does not know counts, though a cluster only drops
    it.
    """
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    _close(schema)
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'.'.join(map(str, each.absolute_path))}: {each.message}" for each in found]


def _close(node: Any) -> None:
    """Objects that name their fields have no others."""
    if isinstance(node, dict):
        if node.pop("x-kubernetes-int-or-string", False):
            node["type"] = ["integer", "string"]
        open_to_all = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
        if isinstance(node.get("properties"), dict) and node.get("type") == "object" and not open_to_all:
            node["additionalProperties"] = False
        for each in node.values():
            _close(each)
    elif isinstance(node, list):
        for each in node:
            _close(each)


def _reduced(node: Any, names_fields: bool = False) -> Any:
    """Without the descriptions; `names_fields`: the keys are fields, of which one may be called so."""
    if isinstance(node, dict):
        kept = {key: each for key, each in node.items() if names_fields or key != "description"}
        return {key: _reduced(each, key == "properties" and not names_fields) for key, each in kept.items()}
    return [_reduced(each) for each in node] if isinstance(node, list) else node


def _said_once(schema: dict[str, Any]) -> dict[str, Any]:
    """With `$defs` for what is there more than once."""
    seen: Counter[str] = Counter()

    def text_of(node: dict[str, Any]) -> str:
        text = json.dumps(node, sort_keys=True)
        return text if len(text) >= WORTH_A_NAME and isinstance(node.get("type"), str) else ""

    def count(node: Any) -> None:
        for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            count(each)
        if isinstance(node, dict):
            seen[text_of(node)] += 1

    names: dict[str, str] = {}
    definitions: dict[str, Any] = {}

    def put(node: Any) -> Any:
        if isinstance(node, list):
            return [put(each) for each in node]
        if not isinstance(node, dict):
            return node
        text = text_of(node)
        if not text or seen[text] < 2:
            return {key: put(each) for key, each in node.items()}
        if text not in names:
            names[text] = f"d{len(names)}"
            definitions[names[text]] = {key: put(each) for key, each in node.items()}
        return {"$ref": f"#/$defs/{names[text]}"}

    count(schema)
    return {**put(schema), "$defs": definitions}


if __name__ == "__main__":
    crd = yaml.load(sys.stdin, yaml.CSafeLoader)
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
    published = version["schema"]["openAPIV3Schema"]
    del published["properties"]["status"]
    smaller = {"$comment": f"KubeRay, {crd['metadata']['name']}, v1; see tests/support/kuberay_schema.py"}
    print(json.dumps({**smaller, **_said_once(_reduced(published))}, sort_keys=True, separators=(",", ":")))
