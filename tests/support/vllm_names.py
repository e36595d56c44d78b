"""Names of the parameters of vLLM's calls, so that tests need no vLLM: 0.9 to 0.11 (`SamplingParams`: to 0.33),
`use_beam_search` of older ones; for `LLM` with those of EngineArgs that its callers use.
"""

LLM = (
    "model task runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code allowed_local_media_path "
    "allowed_media_domains tensor_parallel_size dtype quantization revision tokenizer_revision seed "
    "gpu_memory_utilization swap_space cpu_offload_gb enforce_eager max_seq_len_to_capture disable_custom_all_reduce "
    "disable_async_output_proc hf_token hf_overrides mm_processor_kwargs pooler_config override_pooler_config "
    "structured_outputs_config kv_cache_memory_bytes compilation_config logits_processors "
    # of EngineArgs
    "max_model_len max_num_seqs max_num_batched_tokens enable_lora max_loras max_lora_rank max_cpu_loras "
    "fully_sharded_loras kv_cache_dtype enable_prefix_caching enable_chunked_prefill block_size "
    "num_gpu_blocks_override load_format download_dir code_revision generation_config override_generation_config "
    "pipeline_parallel_size "
    "data_parallel_size distributed_executor_backend speculative_config limit_mm_per_prompt max_logprobs logprobs_mode "
    "disable_log_stats served_model_name enable_sleep_mode"
)
GENERATE = "prompts sampling_params use_tqdm lora_request priority"
BEAM_SEARCH = "prompts params lora_request use_tqdm concurrency_limit"
CHAT = (
    "messages sampling_params use_tqdm lora_request chat_template chat_template_content_format add_generation_prompt "
    "continue_final_message tools chat_template_kwargs mm_processor_kwargs"
)
SAMPLING_PARAMS = (
    "n best_of use_beam_search "
    "presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop "
    "stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs flat_logprobs detokenize "
    "skip_special_tokens spaces_between_special_tokens logits_processors include_stop_str_in_output "
    "truncate_prompt_tokens output_kind guided_decoding structured_outputs logit_bias allowed_token_ids extra_args "
    "bad_words skip_reading_prefix_cache logprob_token_ids thinking_token_budget repetition_detection "
    "prompt_logprob_token_ids prompt_logprob_start trace_decode_token_ids stream_interval skip_clone "
    "routed_experts_prompt_start"
)
