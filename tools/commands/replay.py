"""`sidestream replay`: compute the answer of a receipt again, and compare."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options.engine import add_command, add_engine_options, add_model, llm_arguments

if TYPE_CHECKING:
    from ...runtime.llm import LLM
    from ...runtime.receipts.receipt import Receipt

DESCRIPTION = """\
Compare a receipt (docs/reliability.md) with a model, an adapter, a prompt and an answer, and compute the answer again.

RECEIPT is a file with the receipt, or with the response that has it. A prompt or answer is a file with text, or with a
JSON list of token ids. Give the engine options of the server. On a CPU the tokens and the bits of their
log-probabilities must be equal; on a GPU they may depend on the batch.

The exit code is 0 if all is the same, 1 if something differs, and 2 if that cannot be told."""

EXAMPLES = """\
examples:
  sidestream replay receipt.json models/llama --adapter adapters/sql --prompt prompt.txt
  sidestream replay response.json models/llama --prompt ids.json --answer answer.txt --receipt-key receipts.key"""

SAME, DIFFERS, UNKNOWN, NOTE = "same", "differs", "cannot tell", "note"
MAX_FILE_BYTES = 16 << 20
Finding = tuple[str, str, str]  # field, state, reason


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s RECEIPT [MODEL] [--adapter DIR ...] [--prompt FILE] [--answer FILE] [options]"
    about = "compute the answer of a receipt again"
    parser = add_command(commands, "replay", about, DESCRIPTION, EXAMPLES, run, usage)
    parser.add_argument("receipt", type=Path, metavar="RECEIPT", help="a JSON file")
    add_model(parser)
    group = parser.add_argument_group("receipt")
    group.add_argument("--adapter", nargs="+", default=[], metavar="DIR", help="adapters that may have answered")
    group.add_argument("--prompt", type=Path, metavar="FILE", help="the prompt, as text or as token ids")
    group.add_argument("--answer", type=Path, metavar="FILE", help="the answer, as text or as token ids")
    group.add_argument("--receipt-key", metavar="FILE", help="the server's key, to check that the receipt is unchanged")
    add_engine_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print a line for each field that was compared, and return the exit code. Raises ValueError for unusable files."""
    from ...runtime.receipts.receipt import MAX_BYTES, is_signed_by, parse_receipt, read_key

    try:
        receipt = parse_receipt(_read(options.receipt, MAX_BYTES))
    except ValueError as problem:
        raise ValueError(f"RECEIPT {options.receipt}: {problem}") from None
    mac = ("mac", NOTE, "not checked; give --receipt-key, or other fields may have been altered")
    if options.receipt_key is not None:
        signed = is_signed_by(receipt, read_key(options.receipt_key))
        mac = ("mac", SAME, "") if signed else ("mac", DIFFERS, "the receipt was altered, or has another key")
    findings = [mac, *(compare(receipt, options) if mac[1] != DIFFERS else ())]
    for field, state, reason in findings:
        print(f"{field:<9} {state}{reason and ': ' + reason}")
    states = {state for _, state, _ in findings}
    return 1 if DIFFERS in states else 2 if UNKNOWN in states else 0


def compare(receipt: "Receipt", options: argparse.Namespace) -> list[Finding]:
    """Compare prompt, answer and model with a receipt; compute the answer again unless something differs."""
    from ...runtime.receipts.base_hash import base_hash
    from ...runtime.receipts.receipt import hash_of_ids
    from ...runtime.text.tokenizer import load_tokenizer

    arguments, ids, answer = llm_arguments(options), None, None
    directory = Path(arguments["model"])
    findings = [("base", NOTE, "its hash was not known when the receipt was made")]
    if receipt.base:
        findings = [("base", SAME if base_hash(directory) == receipt.base else DIFFERS, "")]
    if options.prompt is not None:
        text, listed = _text_or_ids(options.prompt)
        found = [] if listed is None else [listed]
        if listed is None:
            tokenizer, texts = load_tokenizer(directory), (text, text.removesuffix("\n"))
            if tokenizer is None:
                raise ValueError(
                    f"--prompt {options.prompt} is text, and MODEL has no tokenizer; give token ids as JSON"
                )
            found = [tokenizer.encode(each, special) for each in texts for special in (True, False)]
        ids = next((each for each in found if hash_of_ids(each) == receipt.prompt), None)
        findings.append(("prompt", DIFFERS if ids is None else SAME, ""))
    if options.answer is not None:
        answer, listed = _text_or_ids(options.answer)
        if listed is not None:
            same = hash_of_ids(listed) in [output.sha256 for output in receipt.outputs]
            answer, findings = None, [*findings, ("answer", SAME if same else DIFFERS, "")]
    if any(state == DIFFERS for _, state, _ in findings):
        return findings
    if ids is None:
        return [*findings, ("outputs", UNKNOWN, "give the prompt with --prompt FILE")]
    named = {f"adapter-{index}": path for index, path in enumerate(options.adapter)} | arguments["adapters"]
    if receipt.adapter and not named:
        return [*findings, ("adapter", UNKNOWN, "give the adapter with --adapter DIR")]
    from ...runtime.llm import LLM

    arguments["adapters"] = named if receipt.adapter else {}
    with LLM(**arguments, show_progress=False) as llm:
        return [*findings, *answer_again(receipt, llm, ids, answer)]


def answer_again(receipt: "Receipt", llm: "LLM", ids: list[int], answer: str | None = None) -> list[Finding]:
    """Compute a receipt's answer with the adapter of its content, and compare; `answer`: its text, if it is given."""
    from ...runtime.receipts.receipt import HIDDEN, hash_of_ids, hash_of_logprobs

    registry, findings = llm.registry, list[Finding]()
    contents = {registry.by_number(number).content_hash: name for name, number in registry.numbers.items()}
    if receipt.adapter:
        if receipt.adapter not in contents:
            return [("adapter", DIFFERS, "no given adapter has its content")]
        findings.append(("adapter", SAME, ""))
    if receipt.hidden:
        return [*findings, ("outputs", UNKNOWN, f"the request had {' or '.join(HIDDEN)}, and receipts do not")]
    if any(output.seed is None for output in receipt.outputs):
        return [*findings, ("outputs", UNKNOWN, "it was continued in another engine, or its adapter was updated")]
    known = llm.model.numerics == receipt.numerics
    if not known:
        findings.append(("numerics", NOTE, "give the server's engine options, on its version and device"))
    exact = known and receipt.device == llm.device.type == "cpu"
    params = [_params(receipt, output) for output in receipt.outputs]
    made = llm.generate([ids] * len(params), params, contents.get(receipt.adapter), use_tqdm=False)
    pairs = [(each.outputs[0], output) for each, output in zip(made, receipt.outputs, strict=True)]
    if any(hash_of_ids(got.token_ids) != want.sha256 for got, want in pairs):
        return [*findings, ("outputs", *((DIFFERS, "other tokens") if exact else (UNKNOWN, "other roundings?")))]
    findings.append(("outputs", SAME, ""))
    if exact and any(want.logprobs and hash_of_logprobs(got) != want.logprobs for got, want in pairs):
        findings.append(("logprobs", DIFFERS, "of the same tokens"))
    if answer is not None:
        same = any(got.text in (answer, answer.removesuffix("\n")) for got, _ in pairs)
        findings.append(("answer", SAME if same else DIFFERS, ""))
    return findings


def _params(receipt: "Receipt", output: Any) -> Any:
    """Return the parameters that compute one completion again; stop strings could only end it earlier."""
    from msgspec import structs

    from ...runtime.api.sampling_params import SamplingParams

    given, count = structs.asdict(receipt.sampling), max(1, output.tokens)
    own = {"n": 1, "seed": output.seed, "max_tokens": count, "min_tokens": min(given["min_tokens"], count)}
    # hashes are of the sampled tokens' log-probabilities only
    counted = {"logprobs": None if given["logprobs"] is None else 0, "prompt_logprobs": None}
    unused = {"speculation": None, "receipt": False}
    return SamplingParams(**given | own | counted | unused)


def _text_or_ids(path: Path) -> tuple[str, list[int] | None]:
    """Return the text of a file, and the token ids if it is a JSON list of them."""
    text = _read(path, MAX_FILE_BYTES).decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text, None
    is_list = isinstance(found, list) and all(type(each) is int and 0 <= each < 1 << 31 for each in found)
    return text, found if is_list else None


def _read(path: Path, limit: int) -> bytes:
    """Return a file's content. Raises ValueError if it cannot be read or has more than `limit` bytes."""
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}; name a file that can") from None
    if len(content) > limit:
        raise ValueError(f"{path} has more than {limit} bytes; name another file")
    return content
