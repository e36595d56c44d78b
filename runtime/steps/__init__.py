"""What crosses between scheduler and device.

plan             what one step computes, and what comes back
wire             both as flat bytes
runner           what executes plans
times            what steps take: programs as they were timed, and whole steps as they were seen
"""
