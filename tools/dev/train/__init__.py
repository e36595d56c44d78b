"""Makes the demo model.

demo             trains it
chat             its chat template
corpus           what it knows
models           how trained models and adapters are written
"""
