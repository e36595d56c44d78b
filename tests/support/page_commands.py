"""The command lines of a page, and how a small machine runs them.

A command line is a line of an indented block, or of a fenced block of a shell (or of no language), that begins with a
known word. What follows it after two blanks or ` # ` is a comment.
"""

import re
import shlex
import shutil
from pathlib import Path

from sidestream.runtime.demo_model import DEMO_MODEL

SHELLS = {"", "sh", "bash", "shell", "console"}
NOT_RUN = {  # first words of lines that belong to the reader's machine
    *("make", "pip", "git", "cd", "export", "source", "nvidia-smi", "hf", "huggingface-cli", "ls", "df", "free"),
    *("python3", "uv", "sudo", "docker", "open", "mkdir", "cp", "vllm", "claude"),
}
GROUPS = ("bench", "fleet", "inspect", "keys")
OURS = ("sidestream", "python -m sidestream", "curl")

# What is added to a command so that a CPU runs it in seconds: after its name, and at its end, where a flag wins over
# an earlier one.
SMALLER = {
    "demo": ("", "-o {place}/demo"),
    "inspect dump": ("", "--layers 0"),
    "inspect explain": ("", "--no-changes"),
    "bench latency": ("demo --output-len 96 --num-iters 1", "--concurrency 1 --lora none"),
    "bench throughput": ("demo --scale 64 --num-iters 1", "--concurrency 2 --lora none"),
    "bench startup": ("demo", "--num-adapters 0 --max-num-seqs 2"),
    "bench serve": ("--rate 5 --duration 1 --input-len 4 8 --output-len 4 8", ""),
    "chat": ("-m hello", "--max-tokens 8"),
    "generate --server": ("", "--max-tokens 8"),
}
# What a CPU cannot run ends with one line that names what is missing.
NEEDS = {"tune": "GPU", "bench kernels": "GPU", "--ablate": "GPU"}


def commands(page: str) -> list[str]:
    """The command lines of a page's text, in order."""
    lines: list[str] = []
    fence: str | None = None
    for line in page.replace("\\\n", " ").splitlines():
        mark = re.match(r"\s*```(\w*)", line)
        if mark:
            fence = mark[1] if fence is None else None
        elif (fence in SHELLS) if fence is not None else line.startswith("    "):
            text = re.split(r"\s{2,}(?=\S)|\s#\s", line.strip().removeprefix("$ "))[0].strip()
            if text.startswith(OURS) or text.partition(" ")[0] in NOT_RUN or re.match(r"[A-Z_]+=\S", text):
                lines.append(text)
            elif fence in SHELLS - {""} and text and not text.startswith("#"):
                raise ValueError(f"nobody knows how to try {text!r}; add its first word to NOT_RUN or OURS")
    return lines


def name_of(arguments: list[str]) -> str:
    """`generate`, `generate --server`, or `bench latency`."""
    if arguments[0] == "generate":
        return "generate --server" if "--server" in arguments else "generate"
    return " ".join(arguments[: 2 if arguments[0] in GROUPS else 1])


def smaller(arguments: list[str], place: Path) -> list[str]:
    """The arguments of `sidestream` with what makes the command small."""
    name = name_of(arguments)
    words = len(name.split())
    front, back = (part.format(place=place).split() for part in SMALLER.get(name, ("", "")))
    if arguments[words : words + 1] and not arguments[words].startswith("-"):
        front = front[1:]  # the line names its own model
    return [*arguments[:words], *front, *arguments[words:], *back]


def make_places(line: str, place: Path) -> None:
    """Puts a model or an adapter wherever the line names one below `models/` or `adapters/`; and dumps to compare."""
    for word in shlex.split(line):
        path = word.partition("=")[2] or word
        target = place / path
        if path.startswith("models/") and not target.exists():
            shutil.copytree(DEMO_MODEL, target, ignore=shutil.ignore_patterns("adapters"))
            if "instruct" in path.lower():
                template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
                (target / "chat_template.jinja").write_text(template)
        elif path.startswith("adapters/") and not target.exists():
            shutil.copytree(DEMO_MODEL / "adapters" / "pirate", target)
        elif path == "other-dump/" and not target.exists():
            shutil.copytree(place / "dump", target)
