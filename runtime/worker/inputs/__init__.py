"""What a step brings to the device, and takes back to the host.

step_inputs  a bucket's static inputs
staging      small arrays to the device in one copy, and small tensors back
"""
