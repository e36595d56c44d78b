"""Passes from ATen idioms to semantic ops. Only this folder depends on a model's or a PyTorch release's spelling.

normalize            one spelling for operations that PyTorch spells in several ways
lift_stored_weights  weights that the checkpoint stores in eight bits
lift_bias            matmul + add -> linear with bias
lift_embedding       embedding lookup
lift_rms_norm        RMSNorm
lift_rope            rotary angles and rotary embedding
lift_lora            LoRA branches of linears
fold_multipliers     constant factors of a projection or norm move into its weights
"""
