"""Models under attack: the demo model, or a shape with random weights and adapters."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from ....runtime.client.client import Client
from ...bench.model_directory import write_model
from ...bench.random_model import write_random_adapter
from ...options.engine import DEMO_MODEL
from ...options.models import SHAPES
from .questions import Question, known, measured

DEMO_FLAGS = ("--precision", "fp32", "--max-model-len", "256", "--num-kv-pages", "64", "--max-num-seqs", "8")
"""In fp32 on a CPU answers do not depend on the batch."""
HONEST_RANK = 4


@dataclass(frozen=True)
class Subject:
    """A model: arguments of `sidestream serve`, names of random adapters, and the directory of a valid adapter."""

    arguments: list[str]
    random_adapters: list[str]
    honest_adapter: Path
    demo: bool

    def questions(self, client: Client, source: random.Random) -> list[Question]:
        """Return questions with answers; those of random weights are measured now."""
        found = known(DEMO_MODEL / "prompts.json") if self.demo else measured(client, [None], source)
        return found + measured(client, self.random_adapters, source)


def prepare(folder: Path, shape: str | None, adapters: int, rank: int) -> Subject:
    """Write the model below `folder`: the demo model (`shape` None) or a random one, with random adapters."""
    if shape is None:
        config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
        written = {
            f"random-{index}": write_random_adapter(folder / f"random-{index}", config, rank, index)
            for index in range(adapters)
        }
        arguments, honest = list(DEMO_FLAGS), DEMO_MODEL / "adapters" / "pirate"
    else:
        written = write_model(folder / "model", SHAPES[shape], adapters, rank)
        honest = Path(write_random_adapter(folder / "honest", SHAPES[shape], HONEST_RANK, adapters))
        arguments = [str(folder / "model"), "--load-format", "dummy"]
        if not adapters:
            arguments += ["--max-loras", "1", "--max-lora-rank", str(rank)]
    if written:
        arguments += ["--lora-modules", *(f"{name}={path}" for name, path in written.items())]
    return Subject(arguments, list(written), honest, demo=shape is None)
