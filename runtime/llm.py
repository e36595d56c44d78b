"""`LLM`: a model with many LoRA adapters in this process."""

import contextlib
import gc
import inspect
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, Unpack

import torch
from tqdm import tqdm

from ..graphs.files.update_file import private_update
from .adapters.adapter_sums import AdapterNumbers, SumPart
from .adapters.lora_requests import adapter_names
from .adapters.registry import AdapterRegistry
from .adapters.weighted_sum import sum_obstacle
from .api.adapter_sum import AdapterChoice, with_sum_names
from .api.adapter_update import AdapterUpdate
from .api.adapter_versions import AdapterVersion, names_to_remove, version_of
from .api.beam_search import BeamSearchOutput, BeamSearchParams
from .api.errors import RequestError
from .api.lora_request import LoRARequest
from .api.outputs import FinishReason, Logprob, RequestOutput, ScoreOutput
from .api.request import Request
from .api.sampling_params import SamplingParams
from .demo_model import DEMO_MODEL, demo_adapters
from .engine.beam_search import beam_search
from .engine.engine import Engine
from .engine.llm_keywords import LLMKeywords
from .engine.options import keyword_docs, with_keywords
from .engine.vllm_keywords import without_vllm_keywords
from .scheduler.scheduler import Scheduler
from .text.chat_files import read_chat_templates
from .text.chat_messages import as_conversations
from .text.chat_renderer import ChatRenderer
from .text.generation_config import describe, sampling_defaults
from .text.prompts import (
    adds_special_tokens,
    encode,
    make_requests,
    most_logprobs,
    one_for_each,
    text_or_ids,
    without_special_tokens,
)
from .text.scoring import pair_requests, prompts_and_responses, score_output
from .text.structured.grammar_compiler import GrammarCompiler
from .text.tokenizer import Tokenizer, load_tokenizer
from .worker.model_loader import find_model
from .worker.progress import print_line
from .worker.sleep import SleepControl
from .worker.tensor_parallel.parallel_model import load_parallel_model


class StreamChunk(NamedTuple):
    """New output of one prompt from one step.

    prompt_index     index of the prompt in the list
    text, token_ids  new text and token ids
    finish_reason    set in the last chunk of a completion
    completion       index of the completion, for n > 1
    logprobs         of the new token, if requested
    prompt_logprobs  of the next prompt tokens, from the second one on, if requested; sent before the first new token
    versions         in the last chunk of a completion whose adapter was switched to another version: see
                     CompletionOutput
    """

    prompt_index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    completion: int = 0
    logprobs: dict[int, Logprob] | None = None
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    versions: list[tuple[int, int]] | None = None


class LLM:
    """Run a base model and its LoRA adapters in this process.

        llm = LLM("path/to/llama", adapters={"poetry": "path/to/adapter"})
        outputs = llm.generate(["To be"], SamplingParams(max_tokens=32), adapter="poetry")

    `close` and the end of `with LLM(...) as llm:` free the memory. Not thread-safe.

    model            directory in the Hugging Face format, or None for the demo model with its adapters. With
                     load_format="dummy" it may be a dict with the fields of config.json
    adapters         name -> directory of a PEFT adapter

    All other options are keywords, listed below. Unsupported keywords of vLLM raise OptionError with a remedy, unless
    their value has no effect. `enable_lora=True` reserves slots for adapters that are added later.

    Raises OptionError, ConfigError, CheckpointError or AdapterError before weights are loaded, and CapacityError if the
    device has too little memory. Methods raise RequestError for a request that cannot be served, before any step runs.

    Attributes:

    calibration      the Calibration in use, or None
    compiled         the CompiledModel, with the pass report, the programs and the dump
    registry         the adapters by name
    seconds          start-up times in seconds
    """

    def __init__(
        self,
        model: str | Path | Mapping[str, Any] | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **keywords: Unpack[LLMKeywords],
    ) -> None:
        if model is None and adapters is None:
            adapters = demo_adapters()
        given, model = without_vllm_keywords(keywords, bool(adapters)), DEMO_MODEL if model is None else model
        source, options = find_model(model, **given)
        self.tokenizer = load_tokenizer(source.directory)
        self.model = loaded = load_parallel_model(model, source, adapters or {}, options, given)
        self._end = weakref.finalize(self, loaded.close)
        override = options.engine.override_generation_config or {}
        self._defaults = sampling_defaults(source.directory, options.engine.generation_config, override)
        print_line(line := describe(self._defaults, override), options.engine.show_progress and bool(line))
        self.options, self.device, self.config = options.engine, options.device, source.config
        self.calibration, self.compiled, self.registry = loaded.calibration, loaded.compiled, loaded.registry
        self.num_pages, self.seconds = loaded.limits.num_pages, loaded.seconds
        numbers = loaded.registry.numbers
        self._adapter_numbers = AdapterNumbers(
            numbers,
            partial(_find_part, loaded.registry),
            lambda number, parts, content: loaded.add_sum(number, parts),
            lambda number: scheduler.forget_adapter(number),
            0 if loaded.registry.lora is None else loaded.registry.lora.rank,
            maximum=options.engine.max_adapter_sums,
        )
        scheduler = Scheduler(
            loaded.limits,
            self._adapter_numbers,
            loaded.registry.hashes,
            loaded.registry.invocations,
            asynchronous_loads=True,
        )
        self.engine = Engine(
            scheduler,
            loaded.executor,
            self.tokenizer,
            loaded.eos_ids,
            options.engine.seed,
            overlap=options.device.type == "cuda",
        )
        self._requests = 0
        self._logprobs_mode = options.engine.logprobs_mode
        self._max_logprobs = most_logprobs(options.engine.max_logprobs, self.config.vocab_size)
        self._busy = False
        self._closed = False
        self._open_stream: Generator[Any, None, None] | None = None
        self._renderer: ChatRenderer | None = None
        self._grammars = GrammarCompiler(self.tokenizer, self.config.vocab_size, loaded.eos_ids)

    def close(self) -> None:
        """Free all memory, end open streams, and end the threads after their current jobs. May be called twice.

        Later calls of other methods raise RequestError. Memory that the caller still refers to (`llm.engine`,
        `llm.model`) is not freed.
        """
        if self._closed:
            return
        if self._open_stream is not None:
            self._open_stream.close()
        self._closed = True
        if self._renderer is not None:
            self._renderer.close()
        self._grammars.close()
        self.engine.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._end()
        del self.engine, self.model, self.compiled, self.registry, self.calibration, self._adapter_numbers
        gc.collect()  # programs and their tensors refer to each other; threads end with their owners
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

    def _check_idle(self) -> None:
        self._check_open()
        if self._busy:
            raise RequestError(
                "a stream of this LLM is still open, or a call of another thread; read the stream to its end or "
                "close() it first, and give the prompts of all threads to one call, or to a server with Client"
            )

    def _check_ready(self) -> None:
        self._check_idle()
        if self.is_sleeping():
            raise RequestError("this LLM is asleep; call wake_up() first")

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, with `encode(text)` and `decode(token_ids)`.

        `encode` adds the special tokens that the model expects at the start. Raises RequestError if the model has no
        tokenizer.
        """
        self._check_open()
        if self.tokenizer is None:
            raise RequestError("the model's directory has neither tokenizer.json nor tokenizer.model; use token ids")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of requests without their own.

        Values come from the model's generation_config.json (see the options `generation_config` and
        `override_generation_config`), else from SamplingParams.
        """
        return self._defaults.params()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may use."""
        self._check_open()
        return tuple(self.registry.numbers)

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its output together."""
        self._check_open()
        return self.engine.scheduler.limits.max_model_len

    def prefetch_adapters(self) -> None:
        """Load up to `max_cpu_loras` adapters into host memory, and wait until they are loaded.

        Without this call, adapters are loaded while their first requests run.
        """
        self._check_open()
        self.model.prefetch_adapters()

    def add_adapter(self, name: str, path: str | Path, replace: bool = False) -> None:
        """Add an adapter. With `replace`, replace the adapter of this name; running requests finish with the old one.

        Raises RequestError or AdapterError if the adapter exceeds the engine's limits; the adapters are then unchanged.
        """
        self._check_open()
        named = set(self.registry.numbers.values())
        self.model.add_adapter(name, path, replace)
        self._forget_adapters(named - set(self.registry.numbers.values()))

    def update_adapter(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: Any,
        version: int | None = None,
        inflight: Literal["pin", "switch"] = "pin",
    ) -> AdapterVersion:
        """Make tensors in memory the newest version of an adapter, which need not exist yet. No file is written.

        tensors   name -> tensor in bf16, fp16 or fp32 on any device, as peft's get_peft_model_state_dict returns them
        config    the fields of adapter_config.json, or peft's LoraConfig
        version   a number above the last version; None: the last one + 1
        inflight  pin: running requests finish with their version. switch: at the next step, running requests that named
                  the adapter without a version go on with this one; their KV cache stays, and `versions` of their
                  outputs has the change

        Requests name the newest version `name`, and version 7 `name@7`. The option `adapter_versions` is the number of
        versions to keep. May be called while a stream is open.

        Raises RequestError or AdapterError if the adapter exceeds the engine's limits, and VersionConflictError (a
        RequestError) for a version that is not above the last one; the adapters are then unchanged.
        """
        self._check_open()
        source = AdapterUpdate(tensors, config, inflight)
        with private_update(source.nbytes, source.copy) as file:
            update, gone = self.model.update_adapter(name, file, version, inflight == "switch")
        self._forget_adapters(gone)
        made = version_of(update.name)
        self.engine.switches.add(name, update.number, made, inflight == "switch")
        return AdapterVersion(name, made, update.content_hash)

    def _forget_adapters(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.engine.scheduler.forget_adapter(number)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter with all its versions, or an old version of it, such as `policy@3`. New requests cannot use
        it; its memory is freed when running requests have finished.
        """
        self._check_open()
        removed = {self.model.remove_adapter(each) for each in names_to_remove(name, self.registry.numbers)}
        self._forget_adapters(removed)

    def reset_prefix_cache(self) -> bool:
        """Discard the cached keys and values of prompts. Return False, without effect, while a stream is open."""
        self._check_open()
        done = self.engine.scheduler.reset_prefix_cache()
        self.engine.start_copies()
        return done

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights, adapter slots and KV cache until `wake_up`. Needs enable_sleep_mode=True.

        Programs, CUDA graphs, their buffers, and the adapters in host memory are kept. The prefix cache is discarded,
        but at level 1 not its pages in host memory.

        level   1: move the weights to page-locked host memory; 2: discard them and read the model's directory again at
                `wake_up`, which uses new files there

        Raises RequestError, without effect, while a stream is open. Requests raise RequestError until `wake_up`.
        """
        self._check_idle()
        sleeper = self._sleeper()
        if not sleeper.asleep:
            self.engine.forget_device(keep_host_pages=level == 1)
        sleeper.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that `sleep` freed, and restore its content.

        tags   "weights" (with the adapter slots), "kv_cache", or None for both. Requests need both

        Raises CapacityError if the device has too little free memory. After level 2, raises CheckpointError if the
        weights cannot be read. The call can then be repeated.
        """
        self._check_open()
        self._sleeper().wake_up(tags)

    def is_sleeping(self) -> bool:
        """Return whether the memory of the weights or of the KV cache is freed."""
        self._check_open()
        return self.model.sleeper is not None and bool(self._sleeper().asleep)

    def _sleeper(self) -> SleepControl:
        sleeper = self.model.sleep_control
        if sleeper is None:
            raise RequestError("this LLM cannot sleep; make it with enable_sleep_mode=True")
        return sleeper

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; return their outputs in the same order.

        prompts          text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these
        sampling_params  one for all prompts or one per prompt; None: get_default_sampling_params()
        adapter          adapter name, or weights of a sum of adapters such as {"poetry": 0.7, "sql": 0.3}; one for all
                         prompts or one per prompt; None: the base model
        use_tqdm         show a progress bar
        lora_request     LoRARequest in place of `adapter`, one for all prompts or one per prompt; an unknown adapter
                         is loaded from the request's path and stays loaded
        priority         one for all prompts or one per prompt; lower values are served sooner
        """
        adapter = self._adapter_names(adapter, lora_request)
        ordered = self._complete(self._make_requests(prompts, sampling_params, adapter, priority), use_tqdm)
        for output, lora in zip(ordered, _for_each(lora_request, len(ordered)), strict=False):
            output.lora_request = lora
        return ordered

    def _complete(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to their end; return their outputs in the same order."""
        outputs: dict[str, RequestOutput] = {}
        scores: dict[str, list[dict[int, Logprob] | None]] = {
            request.request_id: [None] for request in requests if request.params.prompt_logprobs is not None
        }
        with tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not use_tqdm) as progress:
            before = self.engine.num_sampled
            for deltas, finished in self._run(requests, stream=False):
                for delta in deltas:
                    scores[delta.request_id] += delta.prompt_logprobs or ()
                for output in finished:
                    outputs[output.request_id] = output
                    progress.update()
                    progress.set_postfix_str(
                        f"{(self.engine.num_sampled - before) / max(progress.format_dict['elapsed'], 1e-9):.0f} tok/s"
                    )
        ordered = [outputs[request.request_id] for request in requests]
        for output in ordered:
            output.prompt_logprobs = scores.get(output.request_id)
        return ordered

    def score(
        self,
        prompts: Any,
        responses: Any,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
        top: int = 0,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[ScoreOutput]:
        """Return the log-probabilities of responses to prompts, in the same order.

        prompts     as for `generate`
        responses   one per prompt: token ids, or text, which gets no special tokens
        top         number of likeliest tokens to report at each position, up to the option max_logprobs
        adapter, use_tqdm, lora_request, priority   as for `generate`

        They are those of the raw logits. On a CPU or with `exact` they equal to the bit those that `generate` reports
        with `logprobs` when it samples the same tokens.
        """
        self._check_open()
        given, answers = prompts_and_responses(prompts, responses, top, self._max_logprobs, self._logprobs_mode)
        requests = pair_requests(
            [self._token_ids(prompt, "prompt", index) for index, prompt in enumerate(given)],
            [self._token_ids(response, "response", index) for index, response in enumerate(answers)],
            top,
            self.config.vocab_size,
            self.max_model_len,
        )
        made = self._make_requests(
            [request.prompt_ids for request in requests],
            [request.params for request in requests],
            self._adapter_names(adapter, lora_request),
            priority,
        )
        scoring = [replace(each, scored=request.scored) for each, request in zip(made, requests, strict=True)]
        return [score_output(output, top) for output in self._complete(scoring, use_tqdm)]

    def _token_ids(self, prompt: Any, noun: str, index: int) -> list[int]:
        """Return the token ids of a prompt, or of a response, which gets no special tokens."""
        text, ids = text_or_ids(prompt, f"{noun} {index}: ", noun)
        if text is None:
            return ids or []
        return encode(text, self.tokenizer, noun == "prompt" and adds_special_tokens(prompt), f"{noun} {index}: ")

    def _adapter_names(self, adapter: Any, lora_request: Any) -> Any:
        """Return adapter names, one for all or one per prompt."""
        if lora_request is None:
            return with_sum_names(adapter)
        self._check_open()
        if adapter is not None:
            raise RequestError("adapter and lora_request both name the adapter; give one of them")
        names = adapter_names(_for_each(lora_request, 1), self.registry, self.add_adapter)
        return names if isinstance(lora_request, Sequence) else names[0]

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `params.beam_width` best continuations of each prompt, best first.

        prompts, adapter, lora_request, use_tqdm   as for `generate`
        params             beam width, length and ranking
        concurrency_limit  maximum number of prompts at the same time; None: all

        Each token of each continuation is one request. The requests share their prefixes in the prefix cache.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, not {type(params).__name__}")
        if concurrency_limit is not None and (not isinstance(concurrency_limit, int) or concurrency_limit < 1):
            raise RequestError(f"concurrency_limit={concurrency_limit!r} must be at least 1, or None")
        requests = self._make_requests(prompts, params.sampling, self._adapter_names(adapter, lora_request))
        for request in requests:
            if len(request.prompt_ids) + params.max_tokens > self.max_model_len:
                raise RequestError(
                    f"a prompt of {len(request.prompt_ids)} tokens and max_tokens={params.max_tokens} exceed "
                    f"max_model_len={self.max_model_len}; lower max_tokens"
                )
        outputs: list[BeamSearchOutput] = []
        group_size = concurrency_limit or max(1, len(requests))
        with tqdm(total=len(requests), desc="Searching", unit="prompt", disable=not use_tqdm) as progress:
            for first in range(0, len(requests), group_size):
                group = requests[first : first + group_size]
                outputs += beam_search(group, params, self.engine.eos_ids, self.tokenizer, self._complete_all)
                progress.update(len(group))
        for output, lora in zip(outputs, _for_each(lora_request, len(outputs)), strict=False):
            for sequence in output.sequences:
                sequence.lora_request = lora
        return outputs

    def _complete_all(
        self, prompts: list[list[int]], params: SamplingParams, origins: list[Request]
    ) -> list[RequestOutput]:
        requests = self._make_requests(prompts, params, [origin.adapter for origin in origins])
        own = [replace(each, given=len(origin.prompt_ids)) for each, origin in zip(requests, origins, strict=True)]
        return self._complete(own, use_tqdm=False)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations; return their outputs in the same order. An output's `prompt` is the rendered template.

        messages                messages as in OpenAI's API, such as [{"role": "user", "content": text}], or a list of
                                such lists; roles: system, developer, user, assistant, tool, and others of the
                                template
        sampling_params, adapter, use_tqdm, lora_request   as for `generate`
        chat_template           text of a Jinja template, or the name of one of the model's templates. None: the
                                adapter's template if it has one, else the model's
        add_generation_prompt   add the text that starts the assistant's answer to the prompt
        continue_final_message  continue the last message; needs add_generation_prompt=False
        tools, chat_template_kwargs   further variables of the template

        The template runs in a child process with limits on time, memory and output.

        Raises RequestError for invalid messages, and ChatTemplateError if there is no template or it raises an error.
        """
        self._check_open()
        conversations = as_conversations(messages)
        base = read_chat_templates(self.model.source.directory)
        names = one_for_each("adapter", self._adapter_names(adapter, lora_request), str, len(conversations), None)
        numbers = [self.registry.numbers.get(name) for name in names]
        own = [None if number is None else self.registry.by_number(number).chat.templates for number in numbers]
        if self._renderer is None:
            self._renderer = ChatRenderer()
        texts = self._renderer.prompts(
            [base if templates is None else templates.over(base) for templates in own],
            conversations,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts = [without_special_tokens(text) for text in texts]
        return self.generate(prompts, sampling_params, adapter, use_tqdm=use_tqdm, lora_request=lora_request)

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
    ) -> Iterator[StreamChunk]:
        """Complete prompts like `generate`; yield new output after each step. Leaving the loop aborts the requests."""
        requests = self._make_requests(prompts, sampling_params, with_sum_names(adapter))
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
                            delta.logprobs,
                            delta.prompt_logprobs,
                            delta.versions,
                        )
            self._check_open()  # `close` ended the steps

        return chunks()

    def _make_requests(self, prompts: Any, sampling_params: Any, adapter: Any, priority: Any = None) -> list[Request]:
        self._check_ready()
        requests = make_requests(
            prompts,
            sampling_params,
            adapter,
            tokenizer=self.tokenizer,
            vocabulary=self.config.vocab_size,
            max_model_len=self.max_model_len,
            adapters=self.registry.numbers,
            first=self._requests,
            max_logprobs=self._max_logprobs,
            default_params=self._defaults.params(),
            priority=priority,
            compile_grammar=self._grammars.compile,
        )
        if any(request.params.receipt for request in requests):
            raise RequestError(
                "receipt=True needs a server and its client; start one: sidestream serve --receipt-key FILE"
            )
        for chosen in {request.adapter for request in requests if request.adapter is not None}:
            self._adapter_numbers.check(chosen)
        self._requests += len(requests)
        return requests

    def _run(
        self, requests: list[Request], stream: bool
    ) -> Generator[tuple[list[Any], list[RequestOutput]], None, None]:
        """Yield the output of each step until all requests are finished. Closing the generator aborts the requests."""
        self._check_ready()
        self._busy = True
        try:
            for request in requests:
                self.engine.add(request, stream)
            while self.engine.has_work:
                yield self.engine.step()
        finally:
            try:
                for request in requests:
                    self.engine.abort(request.request_id)
                while self.engine.has_work:  # before another call: these steps drop outputs
                    self.engine.step()
            finally:
                self._busy = False


def _find_part(registry: AdapterRegistry, name: str) -> SumPart:
    registry.require(name)
    found = registry.by_number(registry.numbers[name])
    return SumPart(found.number, found.adapter.rank, found.content_hash, sum_obstacle(found.adapter))


def _for_each(lora_request: Any, count: int) -> list[Any]:
    return list(lora_request) if isinstance(lora_request, Sequence) else [lora_request] * count


LLM.__signature__ = with_keywords(inspect.signature(LLM))  # type: ignore[attr-defined]
LLM.__doc__ = f"{inspect.cleandoc(LLM.__doc__ or '')}\n\n{keyword_docs()}\n"
