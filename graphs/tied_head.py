"""The output head of a tied model: its embedding, unless the checkpoint has another one."""

import logging
from functools import cache
from pathlib import Path

from .checkpoint import EMBEDDING, HEAD, Checkpoint, CheckpointError

_log = logging.getLogger(__name__)


def is_untied(directory: Path) -> bool:
    """Return whether a model whose config.json ties its head has another one in its files: it is served with that one,
    as by transformers 5, which is logged once. False for files that cannot be read: loading them reports why.
    """
    try:
        untied = Checkpoint(directory).has_own_head()
    except CheckpointError:
        return False
    if untied:
        _report(directory)
    return untied


@cache
def _report(directory: Path) -> None:
    _log.warning(
        "%s: config.json sets tie_word_embeddings, but %s differs from %s: the model is served with its own head; set "
        "tie_word_embeddings to false there",
        directory,
        HEAD,
        EMBEDDING,
    )
