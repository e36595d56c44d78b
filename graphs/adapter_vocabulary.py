"""An adapter's tensors of the embedding and the output head that are not LoRA: whole matrices and trained tokens.

PEFT saves whole matrices for `modules_to_save`, for LoRA on the embedding, after a resize and with
`save_embedding_layers`. Rows that equal the base's need no work; others are served as a low-rank update
(`vocabulary_rows`). This file does not import torch, see `adapter_description`.
"""

import re
from collections.abc import Mapping

import msgspec

from .adapter_config import CONFIG, AdapterConfig, AdapterError
from .config import LlamaConfig
from .families import VOCABULARY_MODULES
from .files.safetensors_header import ITEM_BYTES, Layout
from .files.untrusted_files import name_of, value_of

MAX_VOCABULARY_TENSORS = 12
"""Each module: A, B, trained tokens, and its matrix under the three names that PEFT may give it."""
_MODULE = rf"(?P<module>{'|'.join(map(re.escape, VOCABULARY_MODULES))})"
_COPY = re.compile(
    rf"{_MODULE}\.(?:(?:token_adapter\.)?base_layer\.|original_module\.|modules_to_save\.(?:default\.)?)?weight"
)
_TOKENS = re.compile(rf"{_MODULE}\.token_adapter\.trainable_tokens_delta(?:\.default)?")
_AGAIN = "save the adapter again with peft's save_pretrained"
_RESIZED = (
    "tokens were added to the base for this adapter, and one model has one vocabulary: merge the adapter into that "
    "larger base (merge_and_unload), save it with its tokenizer, and serve that"
)


class TrainedTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor [n, H] with new rows of the embedding or of the head, and the n token ids."""

    tensor: str
    ids: tuple[int, ...]


class VocabularyTensors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensors of the embedding and the head.

    copies    tensor name -> the module whose whole weight it is
    tokens    module -> its trained tokens
    replaced  modules_to_save names the embedding; a tied head then stays the base's, as in PEFT
    """

    copies: dict[str, str] = {}
    tokens: dict[str, TrainedTokens] = {}
    replaced: bool = False

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return [*self.copies, *(tokens.tensor for tokens in self.tokens.values())]

    def check(self, layout: Layout, config: LlamaConfig) -> None:
        """Raise ValueError unless the tensors fit the base and the file. AdapterError says what does not fit."""
        for name, module in self.copies.items():
            if module not in config.vocabulary_modules or name not in layout.places:
                raise ValueError("a module or tensor that does not exist")
            _check_copy(layout, name, module, config)
        for module, tokens in self.tokens.items():
            if module not in config.vocabulary_modules or tokens.tensor not in layout.places:
                raise ValueError("a module or tensor that does not exist")
            _check_tokens(layout, module, tokens, config)
        if not all(map(layout.is_inside_file, self.names)):
            raise ValueError("a tensor outside of the file")


def find_vocabulary(
    layout: Layout, names: Mapping[str, str], config: LlamaConfig, settings: AdapterConfig
) -> VocabularyTensors:
    """Return the vocabulary's tensors in a file; `names`: tensor name -> its name without PEFT's prefixes.

    Raises AdapterError for tensors that do not fit the base or adapter_config.json.
    """
    copies: dict[str, str] = {}
    tokens: dict[str, TrainedTokens] = {}
    for name, plain in names.items():
        copy, trained = _COPY.fullmatch(plain), _TOKENS.fullmatch(plain)
        if copy is not None and copy["module"] in config.vocabulary_modules:
            copies[name] = copy["module"]
        elif trained is not None and trained["module"] in config.vocabulary_modules:
            module = trained["module"]
            if module in tokens:
                raise AdapterError(
                    f"tensors {name_of(tokens[module].tensor)} and {name_of(name)} are both trained tokens of "
                    f"{module}, and nothing shows which one was trained: {_AGAIN}"
                )
            tokens[module] = TrainedTokens(name, _ids_of(module, settings, config))
    held = {"modules_to_save": set(copies.values()), "trainable_token_indices": set(tokens)}
    for field, modules in held.items():
        for wanted in getattr(settings, field):
            if not any(module == wanted or module.endswith(f".{wanted}") for module in modules):
                raise AdapterError(
                    f"{CONFIG}: {field} names {name_of(wanted)}, but the weights have no such tensor of the embedding "
                    f"or the output head: {_AGAIN}"
                )
    replaced = any(saved.rpartition(".")[2] == "embed_tokens" for saved in settings.modules_to_save)
    found = VocabularyTensors(copies, tokens, replaced)
    found.check(layout, config)
    return found


def _ids_of(module: str, settings: AdapterConfig, config: LlamaConfig) -> tuple[int, ...]:
    """Return the ids of a module's trained tokens. A tied head that is saved too has the embedding's."""
    listed = settings.trainable_token_indices
    embedding, head = VOCABULARY_MODULES
    for wanted in (module, embedding) if config.tie_word_embeddings and module == head else (module,):
        for name, ids in listed.items():
            if wanted == name or wanted.endswith(f".{name}"):
                return ids
    raise AdapterError(
        f"the weights hold trained tokens of {module}, but trainable_token_indices in {CONFIG} does not list any: "
        f"{_AGAIN}"
    )


def _check_copy(layout: Layout, name: str, module: str, config: LlamaConfig) -> None:
    """Raise AdapterError unless a tensor has the base's width and at most its rows."""
    place = layout.places[name]
    _check_dtype(name, place.dtype)
    if len(place.shape) != 2 or place.shape[1] != config.hidden_size or not place.shape[0]:
        raise AdapterError(
            f"tensor {name_of(name)} has shape {list(place.shape)}, but {module} of the base has "
            f"{[config.vocab_size, config.hidden_size]}: the adapter was trained on another base; use that one"
        )
    if place.shape[0] > config.vocab_size:
        raise AdapterError(
            f"tensor {name_of(name)} has {place.shape[0]} rows, the base's vocabulary has {config.vocab_size}: "
            f"{_RESIZED}"
        )


def _check_tokens(layout: Layout, module: str, tokens: TrainedTokens, config: LlamaConfig) -> None:
    """Raise AdapterError unless a tensor has one row of the base's width for each of its tokens."""
    place, count = layout.places[tokens.tensor], len(tokens.ids)
    _check_dtype(tokens.tensor, place.dtype)
    if place.shape != (count, config.hidden_size):
        raise AdapterError(
            f"tensor {name_of(tokens.tensor)} has shape {list(place.shape)}, but trainable_token_indices has {count} "
            f"tokens of {module}, for [{count}, {config.hidden_size}]: the files are of different adapters; {_AGAIN}"
        )
    outside = [token for token in tokens.ids if not 0 <= token < config.vocab_size]
    if outside:
        raise AdapterError(
            f"{CONFIG}: trainable_token_indices has {outside[0]}, but the base's tokens are 0 to "
            f"{config.vocab_size - 1}: {_RESIZED}"
        )


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in ITEM_BYTES:
        raise AdapterError(
            f"tensor {name_of(name)} has dtype {value_of(dtype, ('I8', 'U8', 'F8_E4M3', 'F8_E5M2', 'F64'))}, expected "
            f"one of {', '.join(ITEM_BYTES)}: save it unquantized"
        )
