"""Stands for vLLM where there is none: its names and its rules about arguments, Sidestream's engine on a CPU."""

from typing import Any

import sidestream
from support.vllm_names import LLM as KNOWN
from support.vllm_names import SAMPLING_PARAMS

__version__ = "0.0.fake"
OURS = ("model", "load_format", "max_model_len", "max_num_seqs", "enable_prefix_caching", "seed")
ADAPTERS = ("enable_lora", "max_loras", "max_lora_rank")


class SamplingParams(sidestream.SamplingParams):
    """Takes keywords of vLLM alone."""

    def __init__(self, **arguments: Any) -> None:
        assert set(arguments) <= set(SAMPLING_PARAMS.split()), arguments
        super().__init__(**arguments)


class LLM:
    """Takes keywords of vLLM alone; what asks for a GPU's precision is left out."""

    def __init__(self, **arguments: Any) -> None:
        assert set(arguments) <= set(KNOWN.split()), arguments
        assert arguments["skip_tokenizer_init"] and arguments["dtype"] == "bfloat16"
        self.lora = arguments.get("enable_lora", False)
        taken = {name: arguments[name] for name in (*OURS, *ADAPTERS) if name in arguments}
        self.llm = sidestream.LLM(**taken, precision="bf16", device="cpu")

    def generate(
        self, prompts: list[Any], params: SamplingParams, use_tqdm: bool = True, lora_request: list[Any] | None = None
    ) -> list[sidestream.RequestOutput]:
        """As vLLM: an adapter needs enable_lora; prompts without a tokenizer are dicts of ids."""
        assert not params.detokenize and all(set(prompt) == {"prompt_token_ids"} for prompt in prompts)
        assert lora_request is None or (self.lora and len(lora_request) == len(prompts))
        return self.llm.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)
