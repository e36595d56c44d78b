"""The decoder layer in the name of a module, tensor or KV cache."""

import re

LAYER = re.compile(r"layers[._](?:modules_)?_?(\d+)")
_CACHE = re.compile(r"kv_(?:cache|scale)s?_(\d+)")


def layer_of_name(name: str) -> int | None:
    """Return the layer in the name of a module, checkpoint tensor or KV cache; None without one."""
    found = LAYER.search(name) or _CACHE.fullmatch(name)
    return None if found is None else int(found[1])
