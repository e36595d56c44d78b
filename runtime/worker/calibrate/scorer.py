"""Run texts through an engine's own program: logits of every token, and a hook for each step of the program."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import fx

from ....compiler.build_program import build_program
from ....compiler.graph.nodes import aten, bind, is_call
from ....compiler.program.program import Bucket
from ....compiler.run.bound_program import BoundProgram, OnStep
from ....ops.core.kv_layout import PAGE_SIZE
from ...scheduler.sequence import find_activation
from ..model import Model

LOGIT_ELEMENTS = 1 << 26  # of one step: 256 MiB in fp32
MAX_TOKENS, MIN_TOKENS = 8192, 64


@dataclass(frozen=True)
class Document:
    """A text as token ids for an adapter (None: the base model).

    group   label of its results instead of the adapter
    kinds   kind of each predicted token, see `tools.eval.teacher_forced`; b"": all are text
    """

    tokens: Sequence[int]
    adapter: str | None = None
    group: str = ""
    kinds: bytes = b""

    @property
    def label(self) -> str:
        """Label of its results."""
        return self.group or self.adapter or "base"


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + count` of a document in one step, with KV pages from `first_page` on."""

    document: int
    start: int
    count: int
    first_page: int


def step_sizes(vocabulary: int, longest: int, on_cpu: bool) -> tuple[int, int, int, int]:
    """Return (tokens, sequences, KV pages, blocks) of the steps for documents of at most `longest` tokens."""
    tokens = min(512 if on_cpu else MAX_TOKENS, max(LOGIT_ELEMENTS // vocabulary, MIN_TOKENS))
    sequences, blocks = max(tokens // 16, 1), -(-longest // PAGE_SIZE)
    return tokens, sequences, 2 * blocks + tokens // PAGE_SIZE + sequences + 1, blocks


def plan(lengths: Sequence[int], tokens: int, sequences: int, pages: int) -> Iterator[list[Chunk]]:
    """Yield steps; a document that does not fit continues in the next step on the same pages."""
    step: list[Chunk] = []
    left, page = tokens, 0
    for document, length in enumerate(lengths):
        needed = -(-length // PAGE_SIZE)
        page = 0 if page + needed > pages else page
        start = 0
        while start < length:
            if not left or len(step) == sequences:
                yield step
                step, left = [], tokens
            count = min(left, length - start)
            step.append(Chunk(document, start, count, page))
            start, left = start + count, left - count
        page += needed
    if step:
        yield step


class Scorer:
    """An engine's mixed program with all tokens' logits. The engine cannot serve requests afterwards."""

    def __init__(self, model: Model, tokens: int, sequences: int, pages: int, blocks: int) -> None:
        runner = model.runner
        self.model, self.device, self.tokens = model, model.options.device, tokens
        loader = runner.slot_loader
        lora = loader is not None
        self._num_pages = next(
            tensor.shape[0] for name, tensor in runner.tensors.items() if name.startswith("kv_caches")
        )
        if self._num_pages < pages:
            raise ValueError(f"the engine has {self._num_pages} KV pages, scoring needs {pages}; raise num_kv_pages")
        bucket = Bucket(tokens, sequences, self._num_pages, blocks, False, lora)
        program = build_program(_all_rows(model.compiled.graph_module), bucket, model.compiled.options)
        self.inputs = {
            buffer.name: torch.zeros(buffer.shape, dtype=buffer.dtype, device=self.device)
            for buffer in program.of_kind("input")
            if buffer.name not in runner.tensors
        }
        self.bound = BoundProgram(program, {**runner.tensors, **self.inputs}, self.device)
        self.on_step: OnStep | None = None  # see `BoundProgram.run`
        self.slots: dict[str | None, int] = {None: -1}
        for slot, (name, number) in enumerate(model.registry.numbers.items()):
            if loader is not None:
                loader.load(slot, number)
                self.slots[name] = slot

    def _active_from(self, document: Document) -> int:
        """Return the first token that the document's adapter computes, as `Scheduler.activation`."""
        registry = self.model.registry
        invocation = registry.invocations.get(registry.numbers.get(document.adapter or "", -1))
        start = 0 if invocation is None else find_activation(list(document.tokens), invocation)
        return start if start >= 0 else len(document.tokens)

    def logits(self, step: Sequence[Chunk], documents: Sequence[Document]) -> torch.Tensor:
        """Return logits [tokens of the step, vocabulary], valid until the next call."""
        counts = [chunk.count for chunk in step]
        total = sum(counts)
        rows = torch.repeat_interleave(torch.arange(len(step)), torch.tensor(counts))
        starts = torch.tensor([0, *counts]).cumsum(0)
        first = torch.tensor([chunk.start for chunk in step])
        positions = torch.arange(total) - starts[:-1][rows] + first[rows]
        base = torch.tensor([chunk.first_page for chunk in step])
        blocks = self.inputs["block_table"].shape[1]
        tokens = [documents[chunk.document].tokens[chunk.start : chunk.start + chunk.count] for chunk in step]
        active_from = torch.tensor([self._active_from(documents[chunk.document]) for chunk in step])
        slots = torch.tensor([self.slots[documents[chunk.document].adapter] for chunk in step])
        values = {
            "input_ids": torch.tensor(list(chain.from_iterable(tokens))),
            "positions": positions,
            "slot_mapping": base[rows] * PAGE_SIZE + positions,
            "adapter_index": torch.where(positions < active_from[rows], -1, slots[rows]),
            "block_table": (base[:, None] + torch.arange(blocks)).clamp_max(self._num_pages - 1),
            "context_lens": first + torch.tensor(counts),
            "query_start": starts,
        }
        padding = {"slot_mapping": -1, "adapter_index": -1, "query_start": total}
        for name, target in self.inputs.items():
            host = torch.full(target.shape, padding.get(name, 0), dtype=target.dtype)
            if name in values:
                host[: len(values[name])] = values[name].to(target.dtype)
            target.copy_(host)
        return self.bound.run(on_step=self.on_step)[0][:total]


def _all_rows(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph that computes the logits of every token."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in list(graph.nodes):
        if is_call(node, aten.index_select.default) and getattr(bind(node).index, "name", "") == "logits_indices":
            node.replace_all_uses_with(bind(node).self)
            graph.erase_node(node)
    return fx.GraphModule(graph_module, graph)
