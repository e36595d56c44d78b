"""Measure drafts on real answers: `python -m sidestream.tools.dev.bench.drafts.real MODEL --adapters DIR`.

MODEL is a directory, or the GGUF of SmolLM2 as for `sidestream eval --real` (default: the demo model). DIR has a
directory for each adapter, named after its evaluation task. Each adapter and task is asked held-out questions,
greedily, `--concurrency` at a time, by engines that differ in their drafts:

  off       no speculation
  own       drafts from a request's own tokens
  history   also from former answers of the same adapter, which are forgotten before each line of the table
  auto      the same, with as many drafts as the engine chooses
  trained   with --draft HEAD: drafts of the head unless a long enough end of own tokens matches
  all       also from former answers; all-auto: the same, with as many drafts as the engine chooses

It prints, by adapter and task: tokens per step of a request, accepted drafts (of own tokens, history and head), tokens
per second next to those of `off`, and the answers with other tokens than those of `off`. On a GPU steps with drafts
sum in another order, so near ties may differ: the largest distance of the two tokens' log-probabilities is printed, and
the same without drafts for each number of requests at once, which shows the effect of the batch size alone.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .....compiler.pass_records import columns
from .....runtime.api.sampling_params import SamplingParams
from .....runtime.demo_model import DEMO_MODEL, demo_adapters
from ....options.engine import add_value, check_output, positive
from ....options.environment import write_figures
from ...command_line import dev_parser
from .answers import Counts, answer, counts, first_difference, gaps
from .questions import Load, mixed, questions

OFF, OWN, HISTORY, AUTO = "off", "own", "history", "auto"
TRAINED, ALL, ALL_AUTO = "trained", "all", "all-auto"
ARMS = (OFF, OWN, HISTORY, AUTO, TRAINED, ALL, ALL_AUTO)
WITH_DRAFT = (TRAINED, ALL, ALL_AUTO)
CHOOSES = (OFF, AUTO, ALL_AUTO)
"""Arms with another number of drafts than `--drafts`."""
MIXED = "all adapters mixed"
WARM_UP = 4
"""Questions of each adapter that are answered without drafts before the measurement."""


@dataclass
class Row:
    """A line of the table. `label`: adapter and task; `drafts`: their number, or "auto"."""

    arm: str
    drafts: int | str
    concurrency: int
    label: str
    counts: Counts
    plain_rate: float = 0.0

    @property
    def cells(self) -> list[str]:
        """Return the cells of the line."""
        found = self.counts
        others = [(found.history_accepted, found.history_drafted), (found.trained_accepted, found.trained_drafted)]
        own = found.accepted - sum(each for each, _ in others), found.drafted - sum(each for _, each in others)
        shown = [self.label, str(found.tokens), f"{found.tokens_per_step:.2f}"]
        shown += [f"{accepted}/{drafted}" for accepted, drafted in (own, *others)]
        shown += [f"{found.rate:.0f}", f"{found.rate / self.plain_rate:.2f}" if self.plain_rate else ""]
        return [*shown, f"{found.different}/{found.answers}" + nearness(found.gaps)]


HEADINGS = ["", "tokens", "a step", "own drafts", "history", "trained", "tok/s", "times", "other answers"]


def nearness(found: Sequence[float | None]) -> str:
    """Return the distances of differing answers in words."""
    if not found:
        return ""
    known = [gap for gap in found if gap is not None]
    far = len(found) - len(known)
    shown = f", at most {max(known):.3f} nats apart" if known else ""
    return shown + (f", {far} of them beyond the 20 likeliest" if far else "")


class Bench:
    """Run all arms over the same questions."""

    def __init__(self, options: argparse.Namespace, directory: Path, adapters: dict[str, str]) -> None:
        self.options, self.directory, self.adapters = options, directory, adapters
        self.params = {"temperature": 0.0, "max_tokens": options.max_tokens}
        self._plain: dict[tuple[str, int], tuple[list[Any], float]] = {}
        self._loads: list[Load] = []

    def open(self, arm: str) -> Any:
        """Return an engine."""
        from .....runtime.llm import LLM

        options = self.options
        more: dict[str, Any] = {}
        if arm != OFF:
            more["speculation"] = "auto" if arm in CHOOSES else max(options.drafts)
        if arm in (OWN, TRAINED):
            more["speculation_history"] = 0
        if arm in WITH_DRAFT:
            more["draft"] = str(options.draft)
        if self.adapters:
            more["max_loras"] = len(self.adapters)
        llm = LLM(
            str(self.directory),
            self.adapters,
            precision=options.precision,
            max_model_len=options.max_model_len,
            max_num_seqs=max(options.concurrency),
            enable_prefix_caching=False,
            device=options.device,
            enforce_eager=options.enforce_eager,
            gpu_memory_utilization=options.gpu_memory_utilization,
            show_progress=False,
            **more,
        )
        llm.prefetch_adapters()
        return llm

    def run(self, arms: Sequence[str]) -> Iterator[Row]:
        """Yield rows as they are measured; `off` is first, as the reference."""
        for arm in dict.fromkeys([OFF, *arms]):
            with self.open(arm) as llm:
                if not self._loads:
                    self._loads = questions(
                        self.directory,
                        llm.get_tokenizer(),
                        list(self.adapters),
                        self.options.questions + WARM_UP,
                        self.options.prompts,
                    )
                self._warm_up(llm)
                for concurrency in self.options.concurrency:
                    for drafts in [arm] if arm in CHOOSES else self.options.drafts:
                        yield from self._measure(llm, arm, drafts, concurrency)

    def _warm_up(self, llm: Any) -> None:
        speculation = None if llm.options.speculation == OFF else OFF  # no draft is learned from it
        params = SamplingParams(**self.params, speculation=speculation)
        for load in self._loads:
            prompts = load.prompts[:WARM_UP]
            for concurrency in self.options.concurrency:
                answer(llm, prompts, [load.adapter] * len(prompts), params, concurrency)

    def _measure(self, llm: Any, arm: str, drafts: int | str, concurrency: int) -> Iterator[Row]:
        params = SamplingParams(**self.params, speculation=drafts if isinstance(drafts, int) else None)
        total = Row(arm, drafts, concurrency, "all", Counts())
        for label, prompts, adapters in self._asked(concurrency):
            llm.engine.scheduler.states.answers.clear_all()  # the same questions were answered for another line
            outputs, seconds = answer(llm, prompts, adapters, params, concurrency)
            row = Row(arm, drafts, concurrency, label, counts(outputs, seconds))
            if arm == OFF:
                row.plain_rate = row.counts.rate
                others = self._plain.get((label, self.options.concurrency[0]), (outputs, 0.0))[0]
                self._plain[label, concurrency] = outputs, seconds
            else:
                others = self._plain[label, concurrency][0]
                row.plain_rate = counts(*self._plain[label, concurrency]).rate
            self._compare(llm, row.counts, outputs, others)
            if label != MIXED:
                total.counts.add(row.counts)
            yield row
        plain = [counts(*found) for (label, at), found in self._plain.items() if at == concurrency and label != MIXED]
        total.plain_rate = sum(each.tokens for each in plain) / sum(each.seconds for each in plain)
        yield total

    def _asked(self, concurrency: int) -> Iterator[tuple[str, list[Any], list[str | None]]]:
        """Return (label, prompts, their adapters) of each line but the total."""
        loads = [Load(load.adapter, load.task, load.prompts[WARM_UP:]) for load in self._loads]
        for load in loads:
            if load.prompts:
                yield load.label, load.prompts, [load.adapter] * len(load.prompts)
        together = mixed(loads)
        if concurrency > 1 and len(self.adapters) > 1 and together:
            yield MIXED, [prompt for _, prompt in together], [adapter for adapter, _ in together]

    def _compare(self, llm: Any, found: Counts, outputs: Sequence[Any], others: Sequence[Any]) -> None:
        apart = [
            (one, other)
            for one, other in zip(outputs, others, strict=True)
            if first_difference(one.outputs[0].token_ids, other.outputs[0].token_ids) is not None
        ]
        found.different = len(apart)
        found.gaps = gaps(llm, *map(list, zip(*apart, strict=True))) if apart else []


def title(row: Row) -> str:
    """Return the heading of an arm's table."""
    with_drafts = "" if row.arm in CHOOSES else f", {row.drafts} drafts"
    note = " (other answers: than those of the first number of requests at once)" if row.arm == OFF else ""
    return f"{row.arm}{with_drafts}, {row.concurrency} at once{note}"


def add_subject(parser: argparse.ArgumentParser, questions: int, precision: str) -> None:
    """Add the model, its adapters and the questions; `questions` and `precision` are defaults."""
    about = "a model's directory, or SmolLM2's GGUF (default: the demo)"
    parser.add_argument("model", nargs="?", type=Path, help=about)
    parser.add_argument("--adapters", type=Path, metavar="DIR", help="a directory with a directory for each adapter")
    about = "ask these instead, as `sidestream eval` reads them"
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=about)
    add_value(parser, "--questions", questions, "of each adapter and task")
    add_value(parser, "--max-tokens", 128, "of an answer")
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="as for `sidestream serve`")
    add_value(parser, "--precision", precision, "as for `sidestream serve`", str, None)
    parser.add_argument("--device", choices=("cpu", "cuda"))


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = dev_parser("bench.drafts.real", __doc__)
    add_subject(made, questions=32, precision="int8")
    made.add_argument("--draft", type=Path, metavar="HEAD", help="a trained draft")
    made.add_argument("--arms", nargs="+", choices=ARMS, help="(default: all that there are)")
    add_value(made, "--drafts", [3, 7], "drafts a step", metavar="K", nargs="+")
    add_value(made, "--concurrency", [1, 8], "requests at once", metavar="C", nargs="+")
    made.add_argument("--gpu-memory-utilization", type=float, default=0.5, help="(default: %(default)s)")
    made.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    made.add_argument("--output-json", type=Path, metavar="FILE", help="where the figures go as well")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    options = parser().parse_args(arguments)
    try:
        check_output("--output-json", options.output_json)
        directory, adapters = subject(options.model, options.adapters)
        arms = options.arms or [arm for arm in ARMS if options.draft is not None or arm not in WITH_DRAFT]
        if options.draft is None and set(arms) & set(WITH_DRAFT):
            raise ValueError(f"--arms {' '.join(arms)} needs a trained draft: give --draft HEAD")
        bench, rows = Bench(options, directory, adapters), list[Row]()
        for row in bench.run(arms):
            rows.append(row)
            if row.label == "all":
                place = (row.arm, row.drafts, row.concurrency)
                these = [each for each in rows if (each.arm, each.drafts, each.concurrency) == place]
                lines = [HEADINGS, *(each.cells for each in these)]
                print(f"\n{title(row)}\n{columns(lines, range(1, len(HEADINGS) - 1))}", end="", flush=True)
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if options.output_json is not None:
        plain = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
        derived = ("rate", "tokens_per_step")
        as_json = [asdict(row) | {name: getattr(row.counts, name) for name in derived} for row in rows]
        write_figures(options.output_json, {"options": plain, "rows": as_json})
    return 0


def subject(model: Path | None, adapters: Path | None) -> tuple[Path, dict[str, str]]:
    """Return the model's directory and its adapters by name. Raises ValueError if they do not exist."""
    if model is None:
        return Path(DEMO_MODEL), {name: str(path) for name, path in demo_adapters().items()}
    if model.is_file():
        from ....eval.real.convert_gguf import real_model

        model = real_model(model)
    if not (model / "config.json").is_file():
        raise ValueError(f"{model} holds no config.json; name a model's directory")
    if adapters is None:
        return model, {}
    found = {path.parent.name: str(path.parent) for path in sorted(adapters.glob("*/adapter_config.json"))}
    if not found:
        raise ValueError(f"--adapters {adapters} holds no adapter; name the directory that holds their directories")
    return model, found


if __name__ == "__main__":
    sys.exit(main())
