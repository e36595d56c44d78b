"""Mixtures of experts.

sparse_mlp       a mixture of experts in place of a layer's MLP
expert_parts     experts of a checkpoint as the weights of a graph
adapter_layouts  LoRA on routers and experts: names and layouts in an adapter's file; needs no torch
"""
