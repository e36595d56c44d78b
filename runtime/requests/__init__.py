"""What is asked and answered; imports nothing of runtime.

sampling_params  how one request samples
outputs          what a caller gets back
errors           what goes wrong through a caller's doing
"""
