"""Passes from ATen idioms to semantic ops. Everything that depends on how a model or a PyTorch release spells an
operation is in this folder.

normalize            one spelling for operations that PyTorch spells in several ways
lift_stored_weights  weights that the checkpoint holds in eight bits
lift_bias            matmul + add -> linear with bias
lift_embedding       embedding lookup
lift_rms_norm        RMSNorm
lift_rope_angles     table of rotary angles
lift_rope            rotary embedding
lift_lora            LoRA branches of linears
fold_multipliers     constant factors of a projection or norm move into its weights
"""
