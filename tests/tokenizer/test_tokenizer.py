"""Ids and text as the models' publishers have them; hostile files end in a ModelError."""

import base64
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.base.errors import ModelError, RequestError
from banyan.tokenizer.gguf_tokenizer import SPLITS, GGUFVocabulary
from banyan.tokenizer.load import load_tokenizer
from banyan.tokenizer.tokenizer import Tokenizer
from tests.support.tokenizer_oracles import FOLDERS, demo_gguf, folder, load_reference

TEXTS = (
    "Hello world",
    "def f(x):\n    return x**2  # squared\n\n\nclass A:\n\tpass\n",
    "12345 3.14 1,000,000 ½ ² ٣",
    "日本語のテキスト 中文 한국어",
    "😀👩‍👩‍👧 é e\u0301 العربية हिन्दी",
    "   \n\n\t  x  \r\n",
    " leading and trailing ",
    "",
    "<|im_start|>user\nhi<|im_end|> <think>x</think><tool_call>",
    "a<|endoftext|>b <|eot_id|> c <｜User｜>x<｜Assistant｜>",
    "I'll we'VE don't",
    "<|im_end|",
)
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
VECTORS = json.loads(Path(__file__).with_name("smollm2_vectors.json").read_text())["vectors"]


@cache
def demo() -> Tokenizer:
    return load_tokenizer(demo_gguf())


@cache
def shared(name: str) -> Tokenizer:
    return load_tokenizer(folder(name))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: repr(v["text"][:16]))
def test_the_demo_model_tokenizes_as_transformers_reads_it(vector: dict[str, object]) -> None:
    text = str(vector["text"])
    assert demo().encode(text, add_special_tokens=False) == vector["ids"]
    assert demo().encode(text) == vector["framed"]
    assert demo().decode(demo().encode(text), skip_special_tokens=False) == text


def test_every_digit_of_any_script_stands_alone_in_the_demo_vocabulary() -> None:
    ids = demo().encode("10 ½٣", add_special_tokens=False)
    assert [demo().decode([id]) for id in ids[:4]] == ["1", "0", " ", "½"]


def test_the_demo_model_says_what_ends_a_turn() -> None:
    texts = [demo().id_to_token(id) for id in demo().eos_ids]
    assert texts == ["<|im_end|>", "<|endoftext|>"]
    assert demo().facts.chat_template is not None and "<|im_start|>" in demo().facts.chat_template
    assert demo().vocab_size == 49_152 and demo().bos_id == 1


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_tokenizes_as_transformers_does(name: str) -> None:
    ours, theirs = shared(name), load_reference(name)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("name", "prefix"), [("qwen3", []), ("deepseek_v3", [0]), ("llama3_1", [128_000])]
)
def test_a_plain_prompt_starts_as_the_files_say(name: str, prefix: list[int]) -> None:
    bare = shared(name).encode("x", add_special_tokens=False)
    assert shared(name).encode("x") == [*prefix, *bare]


@pytest.mark.parametrize("name", FOLDERS)
@given(text=TEXT)
@settings(deadline=None, max_examples=60)
def test_plain_text_and_parsed_text_agree_where_there_is_nothing_special(
    name: str, text: str
) -> None:
    tok = shared(name)
    expected = tok.encode(text, add_special_tokens=False)
    if not set(expected) & set(tok.added.values()):
        assert tok.encode(text, add_special_tokens=False, parse_special=False) == expected


@pytest.mark.parametrize("name", FOLDERS)
def test_special_text_is_plain_text_when_not_parsed(name: str) -> None:
    tok = shared(name)
    for text in tok.special_texts:
        ids = tok.encode(f"a{text}b", add_special_tokens=False, parse_special=False)
        assert not set(ids) & tok.special_ids
        assert tok.decode(ids, False) == f"a{text}b"


@pytest.mark.parametrize("name", FOLDERS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_guards_that_touch_no_token_change_nothing(name: str, data: st.DataObject) -> None:
    tok = shared(name)
    some = st.sampled_from(sorted(tok.added)[:40])
    text = "".join(data.draw(st.lists(st.one_of(some, TEXT), max_size=6)))
    assert tok.encode_guarded(text + "x", [len(text) + 1]) == tok.encode(text + "x", False)


def test_a_guard_turns_only_the_token_it_touches_into_text() -> None:
    tok = demo()
    end = tok.token_to_id("<|im_end|>")
    text = "a<|im_end|>b<|im_end|>"
    ids = tok.encode_guarded(text, [2])
    assert ids.count(end) == 1 and ids[-1] == end
    assert tok.decode(ids, skip_special_tokens=False) == text


def test_unpaired_surrogates_are_the_request_s_fault() -> None:
    for parse in (True, False):
        with pytest.raises(RequestError):
            demo().encode("a\ud800b", parse_special=parse)


def tokenizer_json(**parts: object) -> dict[str, object]:
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate("ab1é !")}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "model": model, **parts}


def precompiled(charsmap: bytes) -> dict[str, object]:
    text = base64.b64encode(charsmap).decode()
    return {"type": "Precompiled", "precompiled_charsmap": text}


def replacement(old: str, new: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def write(path: Path, **files: object) -> str:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}.json").write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "null",
        "[" * 200_000,
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        tokenizer_json(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}),
        tokenizer_json(model={"type": "Nothing"}),
        tokenizer_json(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "(a+)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
        tokenizer_json(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "("},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
        tokenizer_json(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "(z+)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
        tokenizer_json(normalizer=precompiled(bytes(10))),
        tokenizer_json(normalizer=precompiled(b"\x08\0\0\0" + b"\xff" * 8 + b"abc")),
        tokenizer_json(
            normalizer={"type": "Sequence", "normalizers": [replacement("z", "zz")] * 7}
        ),
        tokenizer_json(
            normalizer={"type": "Sequence", "normalizers": [replacement("z", "z")] * 65}
        ),
        tokenizer_json(decoder={"type": "Sequence", "decoders": [replacement("a", "aa")] * 40}),
        tokenizer_json(normalizer=replacement("z", "z" * 65)),
    ],
)
def test_a_broken_or_hostile_tokenizer_file_is_refused(content: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_tokenizer(write(tmp_path, tokenizer=content))


def test_twenty_doublings_are_refused_before_a_text_meets_them(tmp_path: Path) -> None:
    """In a process of its own: one letter would become a million, and then the memory's end."""
    doublings = {"type": "Sequence", "normalizers": [replacement("a", "aa")] * 40}
    write(tmp_path, tokenizer=tokenizer_json(normalizer=doublings))
    code = f"""
import resource
from banyan.base.errors import ModelError
from banyan.tokenizer.load import load_tokenizer
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    load_tokenizer({str(tmp_path)!r})
except ModelError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "in 40 steps" in done.stdout, done.stderr


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*[Dd]ownload"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "special_tokens_map"])
def test_a_broken_file_next_to_the_tokenizer_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=name):
        load_tokenizer(write(tmp_path, tokenizer=tokenizer_json(), **{name: "[1"}))


def test_eos_comes_from_every_file_that_names_one(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        tokenizer=tokenizer_json(),
        tokenizer_config={"eos_token": "b", "chat_template": "in the configuration"},
        generation_config={"eos_token_id": [2, 1]},
        config={"eos_token_id": 3},
    )
    (tmp_path / "chat_template.jinja").write_text("in its own file")
    tok = load_tokenizer(path)
    assert tok.eos_ids == (1, 2, 3)
    assert tok.facts.chat_template == "in its own file"


def test_a_token_that_only_the_configuration_has_is_added_at_its_id(tmp_path: Path) -> None:
    added = {"6": {"content": "<x>", "special": True}}
    path = write(
        tmp_path, tokenizer=tokenizer_json(), tokenizer_config={"added_tokens_decoder": added}
    )
    tok = load_tokenizer(path)
    assert tok.encode("a<x>b") == [0, 6, 1] and tok.special_ids == {6}
    added = {"9": {"content": "<x>", "special": True}}
    path = write(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    with pytest.raises(ModelError, match="different models"):
        load_tokenizer(path)


def gguf(**keys: object) -> GGUFVocabulary:
    whole = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["a", "b", "ab"],
        "merges": ["a b"],
        **keys,
    }
    return GGUFVocabulary("x.gguf", {f"tokenizer.ggml.{k}": v for k, v in whole.items()})


@pytest.mark.parametrize(
    "keys",
    [
        {"model": "bert"},
        {"pre": "nobody-knows"},
        {"pre": 5},
        {"tokens": []},
        {"tokens": "abc"},
        {"tokens": [1, 2]},
        {"merges": ["ab"]},
        {"merges": ["a b c"]},
        {"merges": ["a z"]},
        {"merges": ["a b"] * ((1 << 21) + 1)},
        {"token_type": [1]},
        {"eos_token_id": 99},
        {"eos_token_id": -1},
        {"model": "llama"},
        {"model": "llama", "scores": [0.0]},
        {"tokens": ["a" * 5000]},
    ],
)
def test_an_inconsistent_gguf_vocabulary_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"x\.gguf"):
        gguf(**keys).tokenizer()


@pytest.mark.parametrize("pre", SPLITS)
def test_every_known_split_pattern_keeps_the_text(pre: str) -> None:
    letters = sorted({chr(c) for c in range(0x21, 0x17F)})
    tok = gguf(pre=pre, tokens=letters, merges=[]).tokenizer()
    text = "It's 12345 ¡Hola! don't\n\n  x\t日本 A_B"
    assert tok.decode(tok.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("name", "pre"),
    [("qwen3", "qwen2"), ("llama3_1", "llama-bpe"), ("deepseek_v3", "deepseek-v3")],
)
def test_a_vocabulary_tokenizes_the_same_from_gguf_as_from_its_folder(name: str, pre: str) -> None:
    original = json.loads((Path(folder(name)) / "tokenizer.json").read_text())
    ids = original["model"]["vocab"] | {t["content"]: t["id"] for t in original["added_tokens"]}
    controls = {t["content"]: 3 if t["special"] else 4 for t in original["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    pairs = [m if isinstance(m, str) else " ".join(m) for m in original["model"]["merges"]]
    kinds = [controls.get(t, 1) for t in tokens]
    tok = gguf(pre=pre, tokens=tokens, merges=pairs, token_type=kinds).tokenizer()
    for text in TEXTS:
        expected = shared(name).encode(text, add_special_tokens=False)
        assert tok.encode(text, add_special_tokens=False) == expected


def test_sentence_pieces_merge_by_score_and_fall_back_to_bytes() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [2, 3, 3] + [6] * 256
    scored = {"▁": -1.0, "a": -2.0, "b": -3.0, "▁a": -5.0, "ab": -4.0, "▁ab": -6.0}
    tok = gguf(
        model="llama",
        tokens=[*tokens, *scored],
        token_type=kinds + [1] * len(scored),
        scores=[0.0] * len(tokens) + list(scored.values()),
        unknown_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ).tokenizer()
    spelled = [tok.id_to_token(id) for id in tok.encode("ab é</s>")]
    assert spelled == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>", "</s>"]
    assert tok.decode(tok.encode("ab é a b")) == "ab é a b"
