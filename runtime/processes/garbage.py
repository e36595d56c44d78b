"""How often a process looks for garbage in cycles."""

import gc


def collect_seldom() -> None:
    """Before a process loads torch: that makes a million objects which all stay, and by default Python looks through
    them so often that loading takes a quarter longer.
    """
    gc.set_threshold(50_000, 20, 100)
