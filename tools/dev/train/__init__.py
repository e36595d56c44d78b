"""Train the demo model.

demo              train the base model and the adapters
adapter_training  new tokenizers and adapters, and how models and adapters are written
"""
