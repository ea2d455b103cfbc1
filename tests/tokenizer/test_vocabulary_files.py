"""Folders without tokenizer.json: the ids of the algorithms that the files were made for, on texts
of many scripts."""

import base64
import json
import random
import struct

import pytest
import regex
import tokenizers
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from banyan.base.errors import ModelError
from banyan.tokenizer.encode import EncodeKind
from banyan.tokenizer.folder_tokenizer import load_folder_tokenizer
from banyan.tokenizer.gguf_tokenizer import SPLITS
from banyan.tokenizer.load import load_tokenizer, open_tokenizer
from banyan.tokenizer.vocabulary_files import _RANK_PATTERNS, _shown
from tests.support.flags import config_of

_SCRIPTS = (
    (0x41, 0x7A),
    (0xC0, 0x17F),
    (0x400, 0x45F),
    (0x391, 0x3C9),
    (0x5D0, 0x5EA),
    (0x621, 0x64A),
    (0x905, 0x94D),
    (0x985, 0x9CD),
    (0xE01, 0xE3A),
    (0x4E00, 0x4E80),
    (0x3041, 0x30FE),
    (0xAC00, 0xAC80),
)
_OTHER = (
    " ",
    "  ",
    "\n",
    "\t",
    ".",
    "!",
    "'s",
    "2024",
    " 7",
    "🙂",
    "—",
    "\u2028",
    "\r\n",
    "e\u0301",
)


def _texts(count: int, seed: int = 3) -> list[str]:
    rng = random.Random(seed)

    def word() -> str:
        first, last = rng.choice(_SCRIPTS)
        return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 5)))

    def part() -> str:
        return rng.choice((word(), " " + word(), rng.choice(_OTHER)))

    return ["".join(part() for _ in range(rng.randint(1, 12))) for _ in range(count)]


TEXTS = _texts(300)


def _trained(pattern: str, count: int) -> list[bytes]:
    """Tokens by rank: the bytes, then the pairs that a byte-pair encoding of the texts finds."""
    tokens = [bytes([byte]) for byte in range(256)]
    pieces = [
        [bytes([byte]) for byte in piece.encode()]
        for text in _texts(60, seed=4)
        for piece in regex.findall(pattern, text)
    ]
    for _ in range(count):
        pairs: dict[tuple[bytes, bytes], int] = {}
        for piece in pieces:
            for pair in zip(piece, piece[1:], strict=False):
                pairs[pair] = pairs.get(pair, 0) + 1
        pairs = {pair: n for pair, n in pairs.items() if b"".join(pair) not in tokens}
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(left + right)
        for piece in pieces:
            at = 0
            while at < len(piece) - 1:
                if (piece[at], piece[at + 1]) == (left, right):
                    piece[at : at + 2] = [left + right]
                at += 1
    return tokens


def _by_rank(text: str, tokens: list[bytes], pattern: str) -> list[int]:
    """The ids that merging the pair of the lowest rank first gives."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    ids = []
    for piece in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            pairs = [ranks.get(parts[i] + parts[i + 1], 1 << 30) for i in range(len(parts) - 1)]
            if not pairs or min(pairs) == 1 << 30:
                break
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def _write(folder, name: str, content: bytes | object) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / name).write_bytes(raw)


def _encoded(folder, texts: list[str]) -> list[list[int]]:
    backend = load_folder_tokenizer(str(folder)).copy_of_backend()
    return [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("file", "name"),
    [("tiktoken.model", "TikTokenTokenizer"), ("tokenizer.model", "LlamaTokenizer")],
)
def test_a_list_of_ranks_merges_the_lowest_rank_first(file, name, tmp_path):
    # The regex module needs its newer version for sets within sets.
    pattern = _RANK_PATTERNS[name]
    oracle = f"(?V1){pattern}"
    tokens = _trained(oracle, 150)
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    _write(tmp_path, file, b"\n".join(lines))
    added = {str(len(tokens)): {"content": "[BOS]"}}
    _write(
        tmp_path, "tokenizer_config.json", {"tokenizer_class": name, "added_tokens_decoder": added}
    )

    assert _encoded(tmp_path, TEXTS) == [_by_rank(text, tokens, oracle) for text in TEXTS]
    tokenizer = load_folder_tokenizer(str(tmp_path))
    assert tokenizer.token_to_id("[BOS]") == len(tokens)
    assert [tokenizer.decode(ids) for ids in _encoded(tmp_path, TEXTS)] == TEXTS


def test_the_older_file_is_read_where_that_is_asked(tmp_path):
    """By the tokenizer of requests and by its worker processes; a folder without one is refused."""
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel({"h": 0, "[UNK]": 1}, "[UNK]"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.save(str(tmp_path / "tokenizer.json"))
    server = config_of("--tokenizer-mode", "slow", "--tokenizer-worker-num", "2").server
    with pytest.raises(ModelError, match="--tokenizer-mode slow: .* has no tokenizer.model"):
        load_tokenizer(str(tmp_path), is_slow=True)
    pattern = _RANK_PATTERNS["TikTokenTokenizer"]
    tokens = _trained(f"(?V1){pattern}", 150)
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    _write(tmp_path, "tiktoken.model", b"\n".join(lines))
    _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "TikTokenTokenizer"})
    expected = _by_rank(TEXTS[0], tokens, f"(?V1){pattern}")
    assert load_tokenizer(str(tmp_path)).encode(TEXTS[0], False) != expected
    assert load_tokenizer(str(tmp_path), is_slow=True).encode(TEXTS[0], False) == expected
    tokenizer = open_tokenizer(str(tmp_path), server)
    try:
        assert tokenizer.encoder.ids([TEXTS[0]], EncodeKind.PLAIN) == [expected]
    finally:
        tokenizer.encoder.close()


def test_tekken_counts_its_special_tokens_first(tmp_path):
    pattern = SPLITS["llama3"][0]
    tokens = _trained(pattern, 120)
    config = {
        "pattern": pattern,
        "default_vocab_size": len(tokens) + 10 - 50,
        "default_num_special_tokens": 10,
    }
    words = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for rank, token in enumerate(tokens)
    ]
    special = [{"rank": 1, "token_str": "<s>"}, {"rank": 3, "token_str": "[INST]"}]
    _write(tmp_path, "tekken.json", {"config": config, "vocab": words, "special_tokens": special})

    expected = [[10 + id for id in _by_rank(text, tokens[:-50], pattern)] for text in TEXTS]
    assert _encoded(tmp_path, TEXTS) == expected
    tokenizer = load_folder_tokenizer(str(tmp_path))
    assert tokenizer.encode("[INST]")[:2] == [1, 3]
    assert tokenizer.token_to_id("<SPECIAL_9>") == 9


@pytest.mark.parametrize(
    ("reference", "split"), [(GPT2Tokenizer, "gpt-2"), (Qwen2Tokenizer, "qwen2")]
)
def test_a_vocabulary_with_merges_is_read_as_transformers_reads_it(reference, split, tmp_path):
    tokens = _trained(SPLITS[split][0], 120)
    ids = {_shown(token): id for id, token in enumerate(tokens)} | {"<|endoftext|>": len(tokens)}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = ["#version: 0.2"]
    for token in tokens[256:]:
        earlier = tokens[: ranks[token]]
        left = max(
            (
                token[:at]
                for at in range(1, len(token))
                if token[:at] in earlier and token[at:] in earlier
            ),
            key=len,
        )
        merges.append(f"{_shown(left)} {_shown(token[len(left) :])}")
    _write(tmp_path, "vocab.json", ids)
    _write(tmp_path, "merges.txt", "\n".join(merges).encode())
    _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": reference.__name__})

    expected = reference.from_pretrained(str(tmp_path))

    theirs = [expected.encode(text, add_special_tokens=False) for text in TEXTS]
    assert _encoded(tmp_path, TEXTS) == theirs
    assert load_folder_tokenizer(str(tmp_path)).eos_ids == (len(tokens),)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _pieces() -> list[tuple[str, float, int]]:
    """Unknown, controls, bytes, then pieces with their scores."""
    found = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    found += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    texts = _texts(200, seed=5)
    chars = sorted({char for text in texts for char in text.replace(" ", "▁")})[::2] + ["▁"]
    pairs = sorted(
        {text[i : i + n] for text in texts for n in (2, 3) for i in range(len(text) - n)}
    )
    merged = [pair.replace(" ", "▁") for pair in pairs if "▁" not in pair.replace(" ", "▁")[1:]]
    known = dict.fromkeys(chars)
    merged = [m for m in merged if all(c in known for c in m)][:900]
    scored = [(text, -float(at), 1) for at, text in enumerate(dict.fromkeys(merged))]
    return found + scored + [(c, -float(len(scored) + at), 1) for at, c in enumerate(known)]


def _by_score(text: str, pieces: list[tuple[str, float, int]]) -> list[int]:
    """SentencePiece's BPE: the neighbours whose union has the best score are merged first."""
    ids = {piece: id for id, (piece, _, _) in enumerate(pieces)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        best = [
            (pieces[ids[parts[i] + parts[i + 1]]][1], -i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in ids
        ]
        if not best:
            break
        at = -max(best)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return found


def _model(pieces: list[tuple[str, float, int]], kind: int) -> bytes:
    fields = b"".join(
        _field(1, _field(1, text.encode()) + _field(2, score) + _field(3, of))
        for text, score, of in pieces
    )
    facts = _field(3, kind) + _field(40, 0) + _field(41, 1) + _field(42, 2)
    return fields + _field(2, facts) + _field(3, _field(3, 1) + _field(4, 0))


def test_sentence_pieces_merge_by_their_scores(tmp_path):
    pieces = _pieces()
    _write(tmp_path, "tokenizer.model", _model(pieces, kind=2))
    texts = TEXTS[:120]

    assert _encoded(tmp_path, texts) == [_by_score(text, pieces) for text in texts]
    tokenizer = load_folder_tokenizer(str(tmp_path))
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2,)


def test_a_unigram_model_takes_the_likeliest_pieces(tmp_path):
    pieces = [("<unk>", 0.0, 2), ("▁", -2.0, 1), ("a", -3.0, 1), ("b", -3.5, 1), ("ab", -4.0, 1)]
    pieces += [("▁ab", -5.0, 1), ("aba", -9.5, 1)]
    _write(tmp_path, "tokenizer.model", _model(pieces, kind=1))

    assert _encoded(tmp_path, ["ab", "aba", " ab", "x"]) == [[5], [5, 2], [1, 5], [1, 0]]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.model", b"\xff\xff\xff"),
        ("tokenizer.model", b"\x0a\x7fabc"),
        ("tokenizer.model", _field(2, _field(3, 4))),
        ("tokenizer.model", b"AA== 0\nAA== 1\n"),
        ("tokenizer.model", b"AA== 0\n!!!! 1\n"),
        ("tokenizer.model", b"AA== 5\n"),
        ("tekken.json", b"[]"),
        ("tekken.json", b'{"config": {"pattern": ".", "default_vocab_size": 9}, "vocab": []}'),
        ("tekken.json", b"[" * 100_000),
    ],
)
def test_damaged_files_are_refused_by_name(file, content, tmp_path):
    _write(tmp_path, file, content)
    _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})

    with pytest.raises(ModelError, match=file):
        load_folder_tokenizer(str(tmp_path))


def test_a_class_without_a_known_pattern_is_refused_by_name(tmp_path):
    _write(tmp_path, "tiktoken.model", b"AA== 0\n")
    _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "OwnTokenizer"})

    with pytest.raises(ModelError, match="OwnTokenizer"):
        load_folder_tokenizer(str(tmp_path))
