"""The README: each way of use has an example (tests/first_hour/test_installed.py runs them), and its links lead
somewhere.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
WITH_SERVER = re.findall(r"<!-- runnable next to `sidestream serve` -->\n```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", README, re.DOTALL)


def test_each_way_of_use_has_an_example() -> None:
    assert len(EXAMPLES) == 3
    assert len(WITH_SERVER) == 1
    assert len(re.findall("```python", README)) == len(EXAMPLES) + len(WITH_SERVER), (
        "a Python block is not marked as runnable"
    )


def test_relative_links_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page} links to {target}"
