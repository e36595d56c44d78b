"""docs/glossary.md is in the order in which a reader looks a word up."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "glossary.md").read_text()


def test_every_word_is_there_once_and_in_order() -> None:
    words = [word.lower() for word in re.findall(r"^\| ([\w -]+?)(?: \*)? \|", PAGE, re.MULTILINE)[1:]]
    assert len(words) >= 40 and words == sorted(set(words))
