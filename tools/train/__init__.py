"""Makes the demo model.

demo             trains it
corpus           what it knows
models           how trained models and adapters are written
"""
