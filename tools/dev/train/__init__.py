"""Train the demo model.

demo              train the base model and the adapters
chat              its chat template
adapter_training  shapes of adapters, and how models and adapters are written
"""
