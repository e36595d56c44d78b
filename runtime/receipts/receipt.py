"""Fields of a receipt, its MAC, and how a server makes one. docs/reliability.md describes receipts.

A receipt has hashes instead of tokens, paths and names. Whoever holds the prompt and the weights can compute the answer
again; whoever holds the key can check that the receipt is unchanged.
"""

import hashlib
import hmac
import os
import stat
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from ..api.outputs import CompletionOutput, RequestOutput
from ..api.sampling_params import SEED_LIMIT, SamplingParams
from ..processes.threads import prepare_types
from ..protocol.messages import MAX_CHOICES, Sampling

MAX_BYTES = 1 << 18
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4096
HIDDEN = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs")
"""Sampling parameters that may hold text of the user and decide tokens. A receipt has only a hash of them."""
DROPPED = ("stop", "receipt")  # no token before the end depends on them
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
HashOrNone = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Output(Struct, frozen=True, forbid_unknown_fields=True):
    """One completion: number and hash of its tokens, and a hash of their log-probabilities, "" without any.

    seed   null if the answer was continued in another engine, which had another seed, or changed its adapter's version
    """

    tokens: Count
    sha256: Sha256
    seed: Annotated[int, Meta(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)] | None
    finish_reason: Literal["stop", "length"]
    logprobs: HashOrNone


class Receipt(Struct, frozen=True, forbid_unknown_fields=True):
    """A receipt.

    time, instance, engine, device   seconds since the epoch, id of the engine's run, its version, `cpu` or `cuda`
    numerics            `Model.numerics`
    base, adapter       `base_hash`, "" if it was not known yet; content hash of the adapter, "" for the base model
    prompt, prompt_tokens, cached_tokens   hash and number of the prompt's tokens; number of those that were cached
    sampling, hidden    the request's parameters without HIDDEN and DROPPED; hash of those in HIDDEN, "" without any
    mac                 HMAC-SHA256 of the other fields
    """

    v: Literal[1]
    time: Count
    instance: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    engine: Annotated[str, Meta(max_length=64)]
    device: Annotated[str, Meta(max_length=16)]
    numerics: HashOrNone
    base: HashOrNone
    adapter: HashOrNone
    prompt: Sha256
    prompt_tokens: Count
    cached_tokens: Count
    sampling: Sampling
    hidden: HashOrNone
    outputs: Annotated[list[Output], Meta(min_length=1, max_length=MAX_CHOICES)]
    mac: Sha256


prepare_types(Receipt)


def hash_of_ids(token_ids: Sequence[int]) -> str:
    """Return the sha256 of token ids as int32."""
    return hashlib.sha256(array("i", token_ids).tobytes()).hexdigest()


def hash_of_logprobs(completion: CompletionOutput) -> str:
    """Return the sha256 of the log-probabilities of a completion's tokens as fp32; "" if they are not all there."""
    if completion.logprobs is None or len(completion.logprobs) < len(completion.token_ids):
        return ""
    chosen = (next(iter(entry.values())).logprob for entry in completion.logprobs)
    return hashlib.sha256(array("f", chosen).tobytes()).hexdigest()


def split_sampling(params: SamplingParams) -> tuple[Sampling, str]:
    """Return sampling parameters without the user's text, and the hash of those in HIDDEN."""
    given, default = msgspec.convert(params, Sampling, from_attributes=True), Sampling()
    hidden = {name: getattr(given, name) for name in HIDDEN if getattr(given, name) != getattr(default, name)}
    if "logit_bias" in hidden:
        hidden["logit_bias"] = sorted(hidden["logit_bias"].items())
    plain = structs.replace(given, **{name: getattr(default, name) for name in (*HIDDEN, *DROPPED)})
    return plain, hashlib.sha256(msgspec.json.encode(hidden, order="sorted")).hexdigest() if hidden else ""


def mac_of(receipt: Receipt, key: bytes) -> str:
    """Return the MAC of a receipt's fields, whatever its `mac` is."""
    signed = msgspec.json.encode(structs.replace(receipt, mac=""), order="sorted")
    return hmac.new(key, signed, hashlib.sha256).hexdigest()


def is_signed_by(receipt: Receipt, key: bytes) -> bool:
    """Return whether the receipt was made with this key and is unchanged."""
    return hmac.compare_digest(receipt.mac, mac_of(receipt, key))


def parse_receipt(content: bytes) -> Receipt:
    """Return the receipt in JSON, or in an HTTP response as JSON. Raises ValueError for anything else."""
    try:
        found = msgspec.json.decode(content)
        if isinstance(found, dict) and "sidestream_receipt" in found:
            found = found["sidestream_receipt"]
        return msgspec.convert(found, Receipt)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise ValueError(f"it is no receipt: {problem}") from None


def read_key(path: str) -> bytes:
    """Return the key in a file. Raises ValueError for a file that others may read, and for a key that is too short."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(MAX_KEY_BYTES + 1).strip() if stat.S_ISREG(mode) else b""
    except OSError as problem:
        raise ValueError(f"{path} cannot be read ({problem.strerror}); name a file with a secret key") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES or mode & 0o077:
        raise ValueError(
            f"{path} must be a file with {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes that only you can read; make one: "
            f"openssl rand -hex 32 > {path} && chmod 600 {path}"
        )
    return key


class ReceiptMaker:
    """Makes the receipts of one server.

    engine            its version; `instance` returns the id of its run
    for_all           make one for each request, not only where it is requested
    base              the base's hash, once it is known
    device, numerics  of the engine, once it is ready
    """

    def __init__(self, key: bytes, engine: str, instance: Callable[[], bytes], for_all: bool = False) -> None:
        self._key, self._engine, self._instance, self.for_all = key, engine, instance, for_all
        self.base = self.device = self.numerics = ""

    def make(self, params: SamplingParams, adapter_content: str, output: RequestOutput) -> dict[str, Any]:
        """Return the receipt of a finished request, as JSON types."""
        ids, made = output.prompt_token_ids, list(map(_output, output.outputs))
        receipt = Receipt(
            1, int(time.time()), self._instance().hex(), self._engine, self.device, self.numerics, self.base,
            adapter_content, hash_of_ids(ids), len(ids), output.num_cached_tokens, *split_sampling(params), made, "",
        )  # fmt: skip
        signed: dict[str, Any] = msgspec.to_builtins(structs.replace(receipt, mac=mac_of(receipt, self._key)))
        return signed


def _output(completion: CompletionOutput) -> Output:
    ids, reason = completion.token_ids, completion.finish_reason
    seed = None if completion.versions else completion.seed
    return Output(len(ids), hash_of_ids(ids), seed, reason, hash_of_logprobs(completion))  # type: ignore[arg-type]
