"""What crosses between scheduler and device.

plan             what one step computes, and what comes back
wire             both as flat bytes
runner           what executes plans
"""
