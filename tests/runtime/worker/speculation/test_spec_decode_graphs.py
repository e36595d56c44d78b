"""Speculation with captured graphs gives the same answers as without. Here a graph calls its function again and, like a
CUDA graph, writes to the same tensors; `gpu` tests have real ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from sidestream import LLM, RequestOutput, SamplingParams
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.scheduler.step_plan import FORMER_ANSWERS, OWN_TOKENS, TRAINED_DRAFT
from sidestream.runtime.worker.speculation import spec_decode_graphs
from support.eagle import eagle_head
from support.tiny import TinyBase, tiny_llama

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "show_progress": False,
    "precision": "fp32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "speculation": 3,
}
PROMPTS = [[5, 6, 7, 8] * 4, [9, 1, 2, 9, 1, 2, 9, 1], [30, 31, 32, 33, 34, 35]]


class Again:
    """In place of a CUDA graph."""

    replayed: ClassVar[set["Again"]] = set()

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def replay(self) -> None:
        Again.replayed.add(self)
        self._run()

    @property
    def kind(self) -> str:
        """Which of a program's graphs it is."""
        return self._run.__qualname__  # type: ignore[attr-defined]

    def pool(self) -> None:
        """There is none."""


def capture(
    _device: torch.device, prepare: Callable[[], object], run: Callable[[], object], _pool: Any = None
) -> Again:
    prepare()
    return Again(run)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("base"), num_hidden_layers=4)


def summary(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs, output.num_draft_tokens, output.num_accepted_tokens)
        for output in outputs
    ]


@pytest.mark.filterwarnings("error:An output with one or more elements was resized")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("history", [0, 512])
def test_steps_replayed_answer_the_same(
    base: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: int, trained: bool
) -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    head = eagle_head(tmp_path, LlamaConfig.from_directory(base.path), vocabulary=208, **layers) if trained else None
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drawn = SamplingParams(temperature=0.4, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True)
    asks_more = SamplingParams(temperature=0.7, seed=4, max_tokens=3, ignore_eos=True, logprobs=1)
    monkeypatch.setattr(spec_decode_graphs, "capture", capture)
    results, graphs, sources = [], [], set[int]()
    for recorded in (False, True):
        Again.replayed.clear()
        with LLM(base.path, draft=head, speculation_history=history, **OPTIONS) as llm:
            runner = llm.engine.runner
            bind, collect = runner._bind, runner.collect

            def bind_and_capture(program: Any, bind: Any = bind, recorded: bool = recorded) -> Any:
                ready = bind(program)
                if recorded and (program.bucket.decode or program.bucket.verifies):
                    ready.spec_decode.capture(None)
                return ready

            def note(handle: Any, collect: Any = collect) -> Any:
                result = collect(handle)
                sources.update([OWN_TOKENS] if result.sources is None else result.sources.tolist())
                return result

            monkeypatch.setattr(runner, "_bind", bind_and_capture)
            monkeypatch.setattr(runner, "collect", note)
            # twice, so that there are former answers
            results.append(
                [summary(llm.generate(prompts, [greedy, drawn, asks_more], use_tqdm=False)) for _ in range(2)]
            )
        graphs.append({graph.kind for graph in Again.replayed})
    assert results[0] == results[1]
    assert not graphs[0] and len(graphs[1]) == 3, "drafts placed, rows greedy, rows drawn"
    assert sum(each[2] for each in results[0][0]) > sum(each[3] for each in results[0][0]) > 0
    assert sources == {OWN_TOKENS, *[FORMER_ANSWERS] * bool(history), *[TRAINED_DRAFT] * trained}
