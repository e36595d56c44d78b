"""Names of the fields of other projects' bodies, so that tests need none of them: OpenAI's SDK 2, vLLM 0.26 and later,
SGLang 0.5, and older names that clients still send.
"""

_SAMPLING = (
    "model n stop seed stream stream_options temperature top_p top_k min_p min_tokens max_tokens ignore_eos logprobs "
    "presence_penalty frequency_penalty repetition_penalty logit_bias stop_token_ids include_stop_str_in_output "
    "skip_special_tokens spaces_between_special_tokens response_format structured_outputs user priority "
)
_VLLM = (
    "use_beam_search length_penalty watermarking truncate_prompt_tokens truncation_side allowed_token_ids "
    "prompt_logprobs logprob_token_ids bad_words echo add_special_tokens request_id session_id "
    "return_tokens_as_token_ids return_token_ids return_token_offsets return_mm_kwargs routed_experts_prompt_start "
    "cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget "
    "stream_interval "
    # of older releases
    "best_of early_stopping guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
    "guided_whitespace_pattern logits_processors "
)
_SGLANG = (
    "json_schema regex ebnf stop_regex no_stop_trim lora_path session_id session_params custom_params "
    "custom_logit_processor watermark images_config mm_processor_kwargs data_parallel_rank routed_dp_rank "
    "disagg_prefill_dp_rank bootstrap_host bootstrap_port bootstrap_room rid extra_key cache_salt custom_labels "
    "return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details "
    "return_spec_tokens_details return_token_ids "
)
_COMPLETIONS = "prompt best_of suffix prompt_embeds "
_CHAT = (
    "messages audio function_call functions max_completion_tokens metadata modalities moderation parallel_tool_calls "
    "prediction prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort safety_identifier "
    "service_tier store tool_choice tools top_logprobs verbosity web_search_options "
    "include_reasoning add_generation_prompt continue_final_message documents chat_template chat_template_kwargs "
    "media_io_kwargs return_prompt_text return_assistant_tokens_mask "
    "return_prompt_token_ids return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext "
    "return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 "
    "thinking task separate_reasoning stream_reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video "
    "video_config input_ids "
)
_RESPONSES = (
    "background context_management conversation include input instructions max_output_tokens max_tool_calls metadata "
    "model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options temperature text "
    "tool_choice tools top_logprobs top_p truncation user "
    "logit_bias include_reasoning top_k skip_special_tokens include_stop_str_in_output presence_penalty "
    "frequency_penalty request_id media_io_kwargs mm_processor_kwargs priority cache_salt enable_response_messages "
    "previous_input_messages previous_response structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs "
    "kv_transfer_params ec_transfer_params chat_template_kwargs "
    "session_id extra_key data_parallel_rank min_p bootstrap_host bootstrap_port bootstrap_room routed_dp_rank "
    "disagg_prefill_dp_rank "
)
FIELDS = {
    "completions": set((_SAMPLING + _VLLM + _SGLANG + _COMPLETIONS).split()),
    "chat": set((_SAMPLING + _VLLM + _SGLANG + _CHAT).split()),
    "responses": set(_RESPONSES.split()),
}
