"""Trial worker: compiles constraints in a child process, because llguidance's limits do not bound all time and memory.

(A `multipleOf` of 999983 takes half a minute.) `trial` runs this script, which needs only llguidance; its vocabulary is
the bytes. Protocol, one JSON object per line: {} when ready, then {"kind", "text", "options", "limits", "steps",
"seconds"} in, {"grammar"} or {"error"} out.
"""

import json
import random
import re
import resource
import sys
import time
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

MEMORY_BYTES = 1 << 30
END = 256
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # rules of Lark have a single colon


class Bytes:
    """A tokenizer with one token per byte."""

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = END, None, [END]

    def __call__(self, text: bytes) -> list[int]:
        """Return a text's tokens."""
        return list(text)


def grammar_of(kind: str, text: str, options: Any) -> str:
    """Return llguidance's form of a constraint. Raises ValueError."""
    matcher = llguidance.LLMatcher
    if kind == "json":
        return str(matcher.grammar_from_json_schema(text, defaults=options))
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    return str(matcher.grammar_from_lark(gbnf_to_lark(text) if GBNF_RULE.search(text) else text))


def try_constraint(request: dict[str, Any], vocabulary: Any) -> dict[str, str]:
    """Compile the constraint and run some random steps."""
    grammar = grammar_of(request["kind"], request["text"], request["options"])
    limits = llguidance.LLParserLimits(**request["limits"])
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    chance = random.Random(0)
    for _ in range(request["steps"]):
        begin = time.thread_time()  # a process that waits for a processor is not slow
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(END) if mask >> token & 1]
        if not allowed:
            break
        matcher.consume_token(chance.choice(allowed))
        if time.thread_time() - begin > request["seconds"]:
            return {"error": f"a step of it takes more than {request['seconds']:g} s"}
    return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}


def main() -> None:
    """Answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wrapped = llguidance.TokenizerWrapper(Bytes())
    vocabulary = llguidance.LLTokenizer(wrapped, n_vocab=END + 1, eos_token=END)
    print("{}", flush=True)
    for line in sys.stdin:
        try:
            answer = try_constraint(json.loads(line), vocabulary)
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as problem:  # a Rust panic is not an Exception
            answer = {"error": str(problem) or type(problem).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
