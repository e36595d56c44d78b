"""Text that grows token by token is what the tokenizers library and sentencepiece make of all tokens together, whatever
the tokens and wherever the prompt ends.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sidestream.runtime.text.detokenizer import ByteDetokenizer, Detokenizer, make_detokenizer
from sidestream.runtime.text.token_bytes import letters
from sidestream.runtime.text.tokenizer import FastTokenizer, load_tokenizer
from support.byte_fallback import byte_fallback_tokenizer
from support.pieces import sentencepiece_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CLUSTERS = ["👩🏾‍🚒", "🇺🇦", "7️⃣", "☂️", "漢字", "ő", "e\u0301", "ཧཱུྃ", "\u200b", "½", " ", "  ", "\n", "the", " party", "."]
TEXTS = st.lists(st.one_of(st.sampled_from(CLUSTERS), st.text(max_size=3)), max_size=8).map("".join)
BROKEN = st.sampled_from(
    [b"\xe2\x82", b"\xff", b"\x80\x80", b"\xf0\x9f\x98", b"\xc3", b"\xe2\xe2", b"\xed\xa0", b"\xc0"]
)
EXAMPLES = settings(max_examples=60, deadline=None)


@dataclass
class Kind:
    """A tokenizer, and what else reads its tokens."""

    ours: Any
    library: Any
    bytes_at: list[int]

    def decode(self, ids: list[int], skip: bool = True) -> str:
        """What the library makes of them."""
        return self.library.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Bytes, some merges across and within characters, special and added tokens (some of whose letters stand for no
    byte).
    """
    alphabet = letters()
    vocabulary = {letter: byte for byte, letter in enumerate(alphabet)}
    merges = []
    for text in ("é", "世", "界!", " na"):
        parts = [alphabet[byte] for byte in text.encode()]
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts[:2] = [parts[0] + parts[1]]
            vocabulary.setdefault(parts[0], len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    made.add_tokens([AddedToken("<tool>"), AddedToken("日 本")])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return Kind(FastTokenizer(path), made, list(range(256)))


@pytest.fixture(scope="module")
def stripped(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = byte_fallback_tokenizer(path)
    return Kind(FastTokenizer(path), made, [made.token_to_id(f"<0x{byte:02X}>") for byte in range(256)])


@pytest.fixture(scope="module")
def unstripped(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = byte_fallback_tokenizer(path, strip=False)
    return Kind(FastTokenizer(path), made, [made.token_to_id(f"<0x{byte:02X}>") for byte in range(256)])


@pytest.fixture(scope="module")
def kinds(byte_level, stripped, unstripped):
    return byte_level, stripped, unstripped


@pytest.fixture(scope="module")
def piece(tmp_path_factory):
    """A `tokenizer.model` alone, and sentencepiece itself."""
    import sentencepiece

    directory = sentencepiece_model(tmp_path_factory.mktemp("piece"), ["the party of two and three"] * 300)
    library = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    return load_tokenizer(directory), library


def streamed(tokenizer: Any, prompt: list[int], answer: list[int], skip: bool = True) -> str:
    """The pieces of a stream, put together."""
    detokenizer = make_detokenizer(tokenizer, prompt, skip)
    assert isinstance(detokenizer, ByteDetokenizer)
    return "".join(map(detokenizer.push_one, answer)) + detokenizer.push([], last=True)


@EXAMPLES
@given(st.data(), st.booleans())
def test_random_tokens_read_like_the_whole(kinds, data, skip):
    """Also bytes that are no characters, and ids that are no tokens. Byte fallback as the tokenizers library does it
    takes back the characters of a run of bytes that ends in broken ones; streams don't, so words stand around those.
    """
    kind = data.draw(st.sampled_from(kinds))
    word = kind.library.token_to_id("a")
    plain = st.integers(0, kind.library.get_vocab_size() + 1).filter(lambda token: token not in kind.bytes_at)
    broken = BROKEN.map(lambda piece: [word, *(kind.bytes_at[byte] for byte in piece), word])
    encoded = TEXTS.map(lambda text: kind.library.encode(text, add_special_tokens=False).ids)
    parts = data.draw(st.lists(st.one_of(plain.map(lambda token: [token]), broken, encoded), max_size=6))
    ids = [token for part in parts for token in part]
    cut = data.draw(st.integers(0, len(ids)))
    before = kind.decode(ids[:cut], skip)
    answer = streamed(kind.ours, ids[:cut], ids[cut:], skip)
    if not before.endswith("\ufffd"):  # a prompt within a character: see below
        assert answer == kind.decode(ids, skip)[len(before) :]
    middle = (len(ids) + cut) // 2
    detokenizer = make_detokenizer(kind.ours, ids[:cut], skip)
    assert detokenizer.push(ids[cut:middle]) + detokenizer.push(ids[middle:], last=True) == answer


@EXAMPLES
@given(st.data())
def test_broken_bytes_are_one_mark_each_with_byte_fallback(stripped, data):
    pieces = data.draw(st.lists(BROKEN, min_size=1, max_size=4))
    assume(not b"".join(pieces).decode(errors="ignore"))
    ids = [stripped.bytes_at[byte] for byte in b"".join(pieces)]
    assert streamed(stripped.ours, [1], ids) == stripped.decode(ids) == "\ufffd" * len(ids)


@EXAMPLES
@given(st.data(), TEXTS)
def test_a_stream_holds_back_an_incomplete_character_at_most(kinds, data, text):
    kind = data.draw(st.sampled_from(kinds))
    prompt = kind.library.encode("the party of ").ids
    ids = kind.library.encode(text, add_special_tokens=False).ids
    whole = kind.decode([*prompt, *ids])[len(kind.decode(prompt)) :]
    detokenizer, shown = make_detokenizer(kind.ours, prompt, True), ""
    for index, token in enumerate(ids):
        shown += detokenizer.push_one(token)
        so_far = b"".join(map(kind.ours.token_bytes, ids[: index + 1]))
        assert shown == so_far.decode(errors="ignore") == whole[: len(shown)]
    assert shown == whole


@EXAMPLES
@given(st.data(), TEXTS)
def test_a_character_that_the_prompt_begins_comes_whole(kinds, data, text):
    kind = data.draw(st.sampled_from(kinds))
    ids = kind.library.encode(f"{text}🎈🎈🎈 the", add_special_tokens=False).ids
    cut = data.draw(st.integers(1, len(ids)))
    complete = b"".join(map(kind.ours.token_bytes, ids[:cut])).decode(errors="ignore")
    whole = b"".join(map(kind.ours.token_bytes, ids)).decode()
    assert streamed(kind.ours, ids[:cut], ids[cut:]) == whole[len(complete) :]


@pytest.mark.parametrize("prefix", [b"\xe2", b"\xe2\x82", b"\xf0\x9f\x98"])
def test_a_character_that_the_answer_does_not_complete_is_the_prompt_s(kinds, prefix):
    for kind in kinds:
        prompt = [kind.library.token_to_id("a"), *(kind.bytes_at[byte] for byte in prefix)]
        for answer in (kind.library.encode("at", add_special_tokens=False).ids, [kind.bytes_at[0xFF]], []):
            before, whole = kind.decode(prompt), kind.decode([*prompt, *answer])
            assert streamed(kind.ours, prompt, answer) == whole[len(before) :]


def test_special_tokens_within_a_character_do_not_break_it(kinds):
    for kind in kinds:
        ids = [kind.bytes_at[byte] for byte in "🦜".encode()]
        special = kind.library.token_to_id("</s>")
        answer = [ids[0], special, *ids[1:], special]
        assert streamed(kind.ours, [special] * 20, answer) == kind.decode(answer) == "🦜"
        assert streamed(kind.ours, [], answer, skip=False) == kind.decode(answer, skip=False)


def test_the_first_space_is_dropped_at_the_beginning_only(stripped, unstripped):
    (bos, *ids) = stripped.library.encode("the the").ids
    assert streamed(stripped.ours, [bos], ids) == streamed(stripped.ours, [], ids) == "the the"
    assert streamed(stripped.ours, [bos, *ids, *[bos] * 20], ids) == " the the"
    assert streamed(stripped.ours, [bos], ids, skip=False) == " the the", "after <s>"
    assert streamed(unstripped.ours, [bos], ids) == " the the"


@EXAMPLES
@given(TEXTS)
def test_a_tokenizer_model_alone(piece, text):
    ours, library = piece
    ids = library.encode(f"the {text} party")
    assert streamed(ours, [library.bos_id()], ids) == library.decode(ids)
    for cut in range(1, len(ids)):
        complete = b"".join(map(ours.token_bytes, ids[:cut])).decode(errors="ignore")
        assert complete[1:] + streamed(ours, ids[:cut], ids[cut:]) == library.decode(ids)
    assert b"".join(map(ours.token_bytes, ids)).decode() == " " + library.decode(ids)


def test_ids_beyond_the_vocabulary_have_no_text(kinds):
    for kind in kinds:
        assert make_detokenizer(kind.ours, [10**6], True).push([10**6, -1], last=True) == ""
        assert kind.ours.token_bytes(10**6) == kind.ours.token_bytes(-1) == b""


def test_bytes_of_special_and_added_tokens_are_their_names(kinds):
    for kind in kinds:
        for name in ("<s>", "</s>", "<tool>"):
            assert kind.ours.token_bytes(kind.library.token_to_id(name)) == name.encode()


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_a_metaspace_decoder(tmp_path, scheme):
    made = Tokenizer(models.BPE(vocab={"▁": 0, "▁a": 1, "b": 2, "▁▁c": 3}, merges=[]))
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.save(str(tmp_path / "tokenizer.json"))
    ours = FastTokenizer(tmp_path / "tokenizer.json")
    for ids in ([1, 2, 1], [3, 1], [0, 1], [2, 3], [0, 0, 2]):
        for cut in range(len(ids)):
            assert streamed(ours, ids[:cut], ids[cut:]) == made.decode(ids)[len(made.decode(ids[:cut])) :]
    assert ours.token_bytes(1) == b" a"


def test_decoders_that_do_more_are_asked_each_time(tmp_path):
    """WordPiece puts spaces between words, and none before what continues one."""
    words = ["[UNK]", "the", "par", "##ty", "of", "."]
    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    ours = FastTokenizer(tmp_path / "tokenizer.json")
    ids = [1, 2, 3, 4, 1, 2, 3, 5]
    for cut in range(1, len(ids)):
        detokenizer = make_detokenizer(ours, ids[:cut], True)
        assert isinstance(detokenizer, Detokenizer)
        answer = "".join(map(detokenizer.push_one, ids[cut:])) + detokenizer.push([], last=True)
        assert made.decode(ids[:cut]) + answer == made.decode(ids) == "the party of the party."
    assert [ours.token_bytes(token) for token in (1, 3, 5)] == [b" the", b"ty", b"."]
