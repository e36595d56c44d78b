"""`LLM`: a model with many adapters, in this process."""

import contextlib
import gc
import inspect
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from tqdm import tqdm

from .adapters.lora_requests import adapter_names
from .demo_model import DEMO_MODEL, demo_adapters
from .device.model import find_model, load_model
from .engine.engine import Engine
from .engine.options import keyword_docs, with_keywords
from .engine.resolve import load_options
from .engine.vllm_keywords import without_vllm_keywords
from .requests.errors import RequestError
from .requests.lora_request import LoRARequest
from .requests.outputs import FinishReason, RequestOutput
from .requests.request import Request
from .requests.sampling_params import SamplingParams
from .scheduling.scheduler import Scheduler
from .text.chat import ChatRenderer
from .text.chat_template import chat_words
from .text.requests import make_requests
from .text.tokenizer import Tokenizer, adds_token, load_tokenizer


class StreamChunk(NamedTuple):
    """What a step added to one prompt's answer: which prompt (its place in the list), the new text and token ids;
    `finish_reason` comes with the last chunk.
    """

    prompt_index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    completion: int = 0


class LLM:
    """A Llama and its LoRA adapters, compiled for this machine and run in this process.

        llm = LLM("path/to/llama", adapters={"poetry": "path/to/adapter"})
        outputs = llm.generate(["To be"], SamplingParams(max_tokens=32), adapter="poetry")

    `close` gives the memory back, as does the end of `with LLM(...) as llm:`. Not thread-safe.

    model            directory in the Hugging Face format (None: the demo model with its adapters); with
                     load_format="dummy" also config.json's fields as a dict
    adapters         name -> directory of a PEFT adapter
    Every other option is a keyword: a field of EngineOptions or of CompileOptions, as listed at the end. vLLM's others
    are refused with the remedy, unless they ask for what happens anyway; `enable_lora=True` makes room for adapters.

    Raises OptionError, ConfigError, CheckpointError or AdapterError before any weight is loaded, and CapacityError when
    the device is too small. `generate` and `stream` raise RequestError, before anything runs, for a request that cannot
    be served.

    calibration   the Calibration that is in use, or None
    compiled   the CompiledModel: its passes' report, programs and dump
    registry   the adapters by name
    seconds    where the start-up's time went
    """

    def __init__(
        self,
        model: str | Path | Mapping[str, Any] | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **keywords: Any,
    ) -> None:
        if model is None and adapters is None:
            adapters = demo_adapters()
        options = load_options(**without_vllm_keywords(keywords, bool(adapters)))
        source = find_model(DEMO_MODEL if model is None else model, options)
        self.tokenizer = load_tokenizer(source.directory)
        self.model = loaded = load_model(source, adapters or {}, options)
        self.options, self.device, self.config = options.engine, options.device, source.config
        self.calibration, self.compiled, self.registry = loaded.calibration, loaded.compiled, loaded.registry
        self.num_pages, self.seconds = loaded.limits.num_pages, loaded.seconds
        scheduler = Scheduler(loaded.limits, loaded.registry.numbers, loaded.registry.hashes, asynchronous_loads=True)
        self.engine = Engine(
            scheduler,
            loaded.runner,
            self.tokenizer,
            loaded.eos_ids,
            options.engine.seed,
            overlap=options.device.type == "cuda",
        )
        self._requests = 0
        self._busy = False
        self._closed = False
        self._open_stream: Generator[Any, None, None] | None = None
        self._renderer: ChatRenderer | None = None

    def close(self) -> None:
        """Give all memory back and end the threads, each after its present job; open streams end. May be called twice.

        Every later call raises RequestError. Memory that the caller still refers to (`llm.engine`, `llm.model`) stays.
        """
        if self._closed:
            return
        if self._open_stream is not None:
            self._open_stream.close()
        self._closed = True
        if self._renderer is not None:
            self._renderer.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        del self.engine, self.model, self.compiled, self.registry, self.calibration
        gc.collect()  # programs and what they are bound to refer to each other; threads end with what they serve
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this LLM is closed; make a new one")

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode(text)` with the special tokens at the start, `decode(token_ids)`.

        Raises RequestError for a model without one.
        """
        self._check_open()
        if self.tokenizer is None:
            raise RequestError("the model's directory has neither tokenizer.json nor tokenizer.model; use token ids")
        return self.tokenizer

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may use."""
        self._check_open()
        return tuple(self.registry.numbers)

    @property
    def max_model_len(self) -> int:
        """Most tokens that a prompt and its output may come to."""
        self._check_open()
        return self.engine.scheduler.limits.max_model_len

    def prefetch_adapters(self) -> None:
        """Wait until as many adapters as `max_cpu_loras` allows lie in host memory.

        Without it they get there while the first requests run.
        """
        self._check_open()
        self.model.prefetch_adapters()

    def add_adapter(self, name: str, path: str | Path, replace: bool = False) -> None:
        """Make one more adapter usable, or (`replace`) give a name a new content: requests that are under way finish on
        the former one.

        Raises RequestError or AdapterError, and changes nothing, for one that does not fit what the engine was started
        with.
        """
        self._check_open()
        former = self.registry.numbers.get(name)
        self.model.add_adapter(name, path, replace)
        if former is not None:
            self.engine.scheduler.forget_adapter(former)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter: no new request may use it; its slot and its host copy come free when those under way
        are finished.
        """
        self._check_open()
        self.engine.scheduler.forget_adapter(self.registry.remove(name))

    def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of former prompts; False, and nothing is forgotten, while a stream is open."""
        self._check_open()
        return self.engine.scheduler.states.prefix_cache.reset()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the prompts' order.

        prompts          text, token ids, a list of either, or dicts {"prompt": text} / {"prompt_token_ids": ids}
        sampling_params  one for all or one a prompt; None: SamplingParams()
        adapter          an adapter's name for all, or one a prompt (None = the base model)
        lora_request     instead of `adapter`: a LoRARequest for all, or one a prompt; an adapter that is not known is
                         loaded from its path and stays
        priority         one for all or one a prompt: lower is served sooner
        """
        given = list(lora_request) if isinstance(lora_request, Sequence) else [lora_request]
        if lora_request is not None:
            self._check_open()
            if adapter is not None:
                raise RequestError("adapter and lora_request name the same thing; give one of them")
            names = adapter_names(given, self.registry, self.add_adapter)
            adapter = names if isinstance(lora_request, Sequence) else names[0]
        requests = self._make_requests(prompts, sampling_params, adapter, priority)
        outputs: dict[str, RequestOutput] = {}
        with tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not use_tqdm) as progress:
            before = self.engine.num_sampled
            for _, finished in self._run(requests, stream=False):
                for output in finished:
                    outputs[output.request_id] = output
                    progress.update()
                    progress.set_postfix_str(
                        f"{(self.engine.num_sampled - before) / max(progress.format_dict['elapsed'], 1e-9):.0f} tok/s"
                    )
        if not isinstance(lora_request, Sequence):
            given *= len(requests)
        ordered = [outputs[request.request_id] for request in requests]
        for output, asked in zip(ordered, given, strict=False):
            output.lora_request = asked
        return ordered

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or every one of a list of them; outputs come in their order, `prompt` is what the
        model's chat template made.

        messages                a list of {"role": "user", "content": text}, or a list of such lists; roles are system,
                                user, assistant and tool
        sampling_params, adapter, lora_request   as for `generate`
        chat_template           a Jinja template's text to use instead of the model's own
        add_generation_prompt   end the prompt where the assistant's answer begins
        continue_final_message  let the model go on with the last message; needs add_generation_prompt=False
        tools, chat_template_kwargs   what else the template may use

        The template is run in a child process, with limits on time, memory and output. Raises RequestError for messages
        that are none, for a model without a template, and for what the template refuses (ChatTemplateError).
        """
        self._check_open()
        words = chat_words(self.model.source.directory)
        if self._renderer is None:
            self._renderer = ChatRenderer(strip_bos=adds_token(self.tokenizer, words.bos_token))
        prompts = self._renderer.prompts(
            words,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, adapter, use_tqdm=use_tqdm, lora_request=lora_request)

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Iterator[StreamChunk]:
        """The same, token by token: chunks of all prompts as they come. Leaving the loop early ends the requests."""
        requests = self._make_requests(prompts, sampling_params, adapter)
        index = {request.request_id: place for place, request in enumerate(requests)}

        def chunks() -> Iterator[StreamChunk]:
            steps = self._run(requests, stream=True)
            with contextlib.closing(steps):
                if not self._busy:
                    self._open_stream = steps
                for deltas, _ in steps:
                    for delta in deltas:
                        yield StreamChunk(
                            index[delta.request_id],
                            delta.text,
                            delta.token_ids,
                            delta.finish_reason,
                            delta.stop_reason,
                            delta.index,
                        )
            self._check_open()  # `close` ended the steps

        return chunks()

    def _make_requests(self, prompts: Any, sampling_params: Any, adapter: Any, priority: Any = None) -> list[Request]:
        self._check_open()
        if self._busy:
            raise RequestError("a stream of this LLM is still open; read it to its end or close() it first")
        requests = make_requests(
            prompts,
            sampling_params,
            adapter,
            tokenizer=self.tokenizer,
            vocabulary=self.config.vocab_size,
            max_model_len=self.max_model_len,
            adapters=self.registry.numbers,
            first=self._requests,
            priority=priority,
        )
        self._requests += len(requests)
        return requests

    def _run(
        self, requests: list[Request], stream: bool
    ) -> Generator[tuple[list[Any], list[RequestOutput]], None, None]:
        """Steps of the engine until all requests are done; whatever interrupts this ends them."""
        self._check_open()
        if self._busy:
            raise RequestError("a stream of this LLM is still open; read it to its end or close() it first")
        self._busy = True
        try:
            for request in requests:
                self.engine.add(request, stream)
            while self.engine.has_work:
                yield self.engine.step()
        finally:
            self._busy = False
            for request in requests:
                self.engine.abort(request.request_id)
            while self.engine.has_work:
                self.engine.step()


LLM.__signature__ = with_keywords(inspect.signature(LLM))  # type: ignore[attr-defined]
LLM.__doc__ = f"{inspect.cleandoc(LLM.__doc__ or '')}\n\n{keyword_docs()}\n"
