"""Texts read through an engine's own program, step by step: logits of every token, and what each step of the program
is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ....compiler.build import build_program
from ....compiler.graph.nodes import aten, bind, is_call
from ....compiler.program.program import Bucket
from ....compiler.run.emit import BoundProgram, OnStep
from ....ops.core.kv_layout import PAGE_SIZE
from ..model import Model

LOGIT_ELEMENTS = 1 << 26  # of one step and engine: 256 MiB in fp32
MOST_TOKENS, FEWEST_TOKENS = 8192, 64


@dataclass(frozen=True)
class Document:
    """A text as token ids, read by an adapter (None: the base model); `group`: figures of its own instead of the
    adapter's.

    kinds   what each token has to predict, for those who compare (`tools.quality.teacher_forced`); b"": all is text
    """

    tokens: Sequence[int]
    adapter: str | None = None
    group: str = ""
    kinds: bytes = b""

    @property
    def label(self) -> str:
        """Whose figures it counts among."""
        return self.group or self.adapter or "base"


@dataclass(frozen=True)
class Piece:
    """A part of a document that one step computes: tokens `start` ..

    `start + count`, keys and values from page `first_page` on.
    """

    document: int
    start: int
    count: int
    first_page: int


def step_sizes(vocabulary: int, longest: int, on_cpu: bool) -> tuple[int, int, int, int]:
    """(tokens, sequences, KV pages, blocks) of the steps for documents of at most `longest` tokens."""
    tokens = min(512 if on_cpu else MOST_TOKENS, max(LOGIT_ELEMENTS // vocabulary, FEWEST_TOKENS))
    sequences, blocks = max(tokens // 16, 1), -(-longest // PAGE_SIZE)
    return tokens, sequences, 2 * blocks + tokens // PAGE_SIZE + sequences + 1, blocks


def plan(lengths: Sequence[int], tokens: int, sequences: int, pages: int) -> Iterator[list[Piece]]:
    """Steps of at most `tokens` tokens and `sequences` documents.

    A document that does not fit goes on in the next step, on the same pages.
    """
    step: list[Piece] = []
    room, page = tokens, 0
    for document, length in enumerate(lengths):
        needed = -(-length // PAGE_SIZE)
        page = 0 if page + needed > pages else page
        start = 0
        while start < length:
            if not room or len(step) == sequences:
                yield step
                step, room = [], tokens
            count = min(room, length - start)
            step.append(Piece(document, start, count, page))
            start, room = start + count, room - count
        page += needed
    if step:
        yield step


class Scorer:
    """An engine's own mixed program, at one size, with the logits of every token. The engine serves no requests
    afterwards: its adapter slots and KV pages are filled by hand here."""

    def __init__(self, model: Model, tokens: int, sequences: int, pages: int, blocks: int) -> None:
        runner = model.runner
        self.model, self.device, self.tokens = model, model.options.device, tokens
        stacks = runner.stacks
        lora = stacks is not None
        have = next(tensor.shape[0] for name, tensor in runner.tensors.items() if name.startswith("kv_caches"))
        if have < pages:
            raise ValueError(f"the engine has {have} KV pages, scoring needs {pages}; raise num_kv_pages")
        bucket = Bucket(tokens, sequences, have, blocks, False, lora)
        program = build_program(_all_rows(model.compiled.graph_module), bucket, model.compiled.options)
        self.inputs = {
            buffer.name: torch.zeros(buffer.shape, dtype=buffer.dtype, device=self.device)
            for buffer in program.of_kind("input")
            if buffer.name not in runner.tensors
        }
        self.bound = BoundProgram(program, {**runner.tensors, **self.inputs}, self.device)
        self.on_step: OnStep | None = None  # is told of each step of the program, as `BoundProgram.run` does it
        self.slots: dict[str | None, int] = {None: -1}
        for slot, (name, number) in enumerate(model.registry.numbers.items()):
            if stacks is not None:
                stacks.load(slot, number)
                self.slots[name] = slot

    def logits(self, step: Sequence[Piece], documents: Sequence[Document]) -> torch.Tensor:
        """[tokens of the step, vocabulary], valid until the next call."""
        counts = [piece.count for piece in step]
        total = sum(counts)
        rows = torch.repeat_interleave(torch.arange(len(step)), torch.tensor(counts))
        starts = torch.tensor([0, *counts]).cumsum(0)
        first = torch.tensor([piece.start for piece in step])
        positions = torch.arange(total) - starts[:-1][rows] + first[rows]
        base = torch.tensor([piece.first_page for piece in step])
        blocks = self.inputs["block_table"].shape[1]
        values = {
            "input_ids": torch.tensor(
                [
                    token
                    for piece in step
                    for token in documents[piece.document].tokens[piece.start : piece.start + piece.count]
                ]
            ),
            "positions": positions,
            "slot_mapping": base[rows] * PAGE_SIZE + positions,
            "adapter_index": torch.tensor([self.slots[documents[piece.document].adapter] for piece in step])[rows],
            "block_table": torch.minimum(base[:, None] + torch.arange(blocks), torch.tensor(self._last_page)),
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

    @property
    def _last_page(self) -> int:
        return (
            next(tensor.shape[0] for name, tensor in self.model.runner.tensors.items() if name.startswith("kv_caches"))
            - 1
        )


def _all_rows(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph that computes the logits of every token instead of selected rows."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in list(graph.nodes):
        if is_call(node, aten.index_select.default) and getattr(bind(node).index, "name", "") == "logits_indices":
            node.replace_all_uses_with(bind(node).self)
            graph.erase_node(node)
    return fx.GraphModule(graph_module, graph)
