"""Streamed text equals decoded text, for any ids and any split."""

from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from banyan.tokenizer.detokenizer import Detokenizer
from banyan.tokenizer.load import load_tokenizer
from banyan.tokenizer.stop_strings import TextOptions
from banyan.tokenizer.tokenizer import Tokenizer, TokenizerFacts
from tests.support.tokenizer_oracles import FOLDERS, demo_gguf, folder


@cache
def sentence_pieces() -> Tokenizer:
    """A small vocabulary with "▁" for spaces and single bytes, as Llama 2 has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁ab", "é", "日", "▁▁"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[("▁", "a"), ("▁a", "b"), ("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, TokenizerFacts("test", {"bos_token": "<s>", "eos_token": "</s>"}))


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "sentence pieces":
        return sentence_pieces()
    return load_tokenizer(demo_gguf() if name == "demo" else folder(name))


NAMES = ("demo", "sentence pieces", *FOLDERS)


def pieces_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def stream(detokenizer: Detokenizer, pieces: list[list[int]]) -> str:
    return "".join(map(detokenizer.push, pieces)) + detokenizer.finish()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_pushes_over_any_split_give_the_decoded_text(name: str, data: st.DataObject) -> None:
    tok = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 5), max_size=40))
    pieces = pieces_of(ids, data.draw(st.lists(st.integers(0, 40), max_size=8)))
    skip = data.draw(st.booleans())
    options = TextOptions(skip_special_tokens=skip)
    assert stream(Detokenizer(tok, [], options), pieces) == tok.decode(ids, skip)


@pytest.mark.parametrize("name", ["demo", *FOLDERS])
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_decoding_any_ids_equals_the_library(name: str, data: st.DataObject) -> None:
    tok = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size - 1), max_size=30))
    assert tok.decode(ids, False) == tok._backend.decode(ids, skip_special_tokens=False)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_a_text_of_sentence_pieces_survives_the_way_there_and_back(text: str) -> None:
    tok = sentence_pieces()
    ids = tok.encode(text, parse_special=False)
    assert tok.decode(ids, False) == text
    assert tok.decode(ids, False) == tok._backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(alphabet="aé日😀 \n", max_size=30))
@settings(deadline=None, max_examples=50)
def test_every_push_is_a_prefix_without_half_characters(name: str, text: str) -> None:
    tok = tokenizer(name)
    detokenizer = Detokenizer(tok, [], TextOptions())
    sent = ""
    for id in tok.encode(text, add_special_tokens=False):
        sent += detokenizer.push([id])
        assert text.startswith(sent)
    assert sent + detokenizer.finish() == text


def test_an_answer_that_continues_a_text_keeps_its_first_space() -> None:
    tok = sentence_pieces()
    ids = [tok.token_to_id("▁a"), tok.token_to_id("b")]
    assert stream(Detokenizer(tok, [], TextOptions()), [ids]) == "ab"
    assert stream(Detokenizer(tok, [tok.token_to_id("a")], TextOptions()), [ids]) == " ab"


def test_a_character_split_between_prompt_and_answer_appears_whole() -> None:
    tok = sentence_pieces()
    bytes_of = [tok.token_to_id(f"<0x{b:02X}>") for b in "😀".encode()]
    detokenizer = Detokenizer(tok, bytes_of[:2], TextOptions())
    assert detokenizer.push(bytes_of[2:3]) == ""
    assert detokenizer.push(bytes_of[3:]) == "😀"


def test_a_character_that_never_becomes_complete_is_marked_at_the_end() -> None:
    tok = sentence_pieces()
    detokenizer = Detokenizer(tok, [], TextOptions())
    assert detokenizer.push([tok.token_to_id("<0xE6>"), tok.token_to_id("<0x97>")]) == ""
    assert detokenizer.finish() == "\ufffd"
