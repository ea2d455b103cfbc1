"""Writes the vocabulary of one format in another: of a GGUF file as tokenizer.json,
tokenizer_config.json, the chat template and generation_config.json; of a folder as GGUF metadata
(byte-level BPE only). Other readers get the same ids.

GGUF names the pre-tokenizer. The name is found by trial: the first one in `gguf_tokenizer.py` that
gives the folder's ids for a test text.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from tokenizers.processors import TemplateProcessing

from banyan.base.errors import BanyanError, ModelError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import printable
from banyan.formats.gguf import GGUFFile
from banyan.tokenizer.folder_tokenizer import load_folder_tokenizer
from banyan.tokenizer.gguf_tokenizer import SPLITS, GGUFVocabulary
from banyan.tokenizer.tokenizer import Tokenizer

MAX_LENGTH_KEY = "model_max_length"


def folder_words(path: str, context_length: int, eos_ids: tuple[int, ...]) -> dict[str, bytes]:
    """File name -> content; none where the GGUF file has no vocabulary.

    Args:
        eos_ids: those that config.json names.

    Raises:
        ModelError: the vocabulary is of an unknown kind, or inconsistent.
    """
    with GGUFFile.open(path) as file:
        if "tokenizer.ggml.tokens" not in file.metadata:
            return {}
        tokenizer = GGUFVocabulary(path, file.metadata).tokenizer()
    ends = list(dict.fromkeys((*eos_ids, *tokenizer.eos_ids)))
    generation: dict[str, object] = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    for name in ("bos", "pad"):
        text = tokenizer.facts.named.get(f"{name}_token")
        if text is not None:
            generation[f"{name}_token_id"] = tokenizer.token_to_id(text)
    files = {
        "tokenizer.json": _with_frame(tokenizer),
        "tokenizer_config.json": _octets(_usage(tokenizer, context_length)),
        "generation_config.json": _octets(generation),
    }
    if tokenizer.facts.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.facts.chat_template.encode()
    return files


def _with_frame(tokenizer: Tokenizer) -> bytes:
    """The ids before and after a text are a step of the file's own, which every reader takes."""
    prefix, suffix = tokenizer.frame
    backend = tokenizer.copy_of_backend()
    if prefix or suffix:
        texts = {id: tokenizer.id_to_token(id) or "" for id in (*prefix, *suffix)}
        before, after = ([texts[id] for id in ids] for ids in (prefix, suffix))
        pair = [f"{text}:1" for text in before], [f"{text}:1" for text in after]
        backend.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *pair[0], "$B:1", *pair[1]],
            special_tokens=[(text, id) for id, text in texts.items()],
        )
    return backend.to_str(pretty=False).encode()


def _usage(tokenizer: Tokenizer, context_length: int) -> dict[str, object]:
    facts = tokenizer.facts
    usage: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        MAX_LENGTH_KEY: context_length,
        "clean_up_tokenization_spaces": False,
        **facts.named,
    }
    others = {name: text for name, text in facts.chat_templates.items() if name != "default"}
    if others:
        listed: list[Mapping[str, str]] = [
            {"name": name, "template": text} for name, text in facts.chat_templates.items()
        ]
        usage["chat_template"] = listed
    return usage


def _octets(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_FILE = "tokenizer.json"
_TRIED = (
    "I'm sure we'LL see they've 1 23 456 7890 things; it's\u00a0fine.\n\n  Two\tspaces   and\r\n"
    "x=3.14*(a_b+c[0])/{'k': \"v\"} #!$%&@^~| don't DON'T O'Neil \u00c0\u00c9\u00ee\u00f5 \ufb01 "
    "\uff21\uff11 e\u0301 \u4f60\u597d\uff0c\u4e16\u754c 12\u5e7434 \u3053\u3093\u306b \u0417 "
    "\u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f468\u200d\U0001f469 ...---___\n\n\n   \n "
    "camelCaseHTTPServer a//b /path/to ?? !! \u0928\u092e\u0938\u094d\u0924\u0947 \u2167\u00bd"
)
"""Contractions in both cases, digits in runs, white space of every kind, marks, other scripts."""


def gguf_words(folder: str, vocab_size: int, ids: Mapping[str, object]) -> dict[str, object]:
    """
    Args:
        vocab_size: rows of the embedding; ids that no word has are filled.
        ids: the keys of words with a meaning, such as tokenizer.ggml.bos_token_id.

    Returns:
        Keys of the metadata; none where the folder has no tokenizer.

    Raises:
        ModelError: the vocabulary is of a kind that is not translated.
    """
    path = Path(folder) / _FILE
    if not path.is_file():
        return {}
    described = cast(Mapping[str, object], json.loads(path.read_text(encoding="utf-8")))
    tokenizer = load_folder_tokenizer(folder)
    keys = _vocabulary(described, vocab_size, folder) | _gguf_usage(tokenizer)
    expected = tokenizer.encode(_TRIED)
    for name in _by_likelihood(described):
        tried = keys | {"tokenizer.ggml.pre": name}
        if _ids(folder, {**ids, **tried}) == expected:
            return tried
    raise _untranslated(folder, "splits words in a way of its own")


def _ids(folder: str, keys: Mapping[str, object]) -> list[int]:
    try:
        return GGUFVocabulary(folder, keys).tokenizer().encode(_TRIED)
    except BanyanError:
        return []


def _by_likelihood(described: Mapping[str, object]) -> Iterator[str]:
    """Names that split differently, those first whose patterns stand in the file."""
    written = tuple(_patterns(described.get("pre_tokenizer")))
    yield from (name for name, patterns in SPLITS.items() if patterns == written)
    yield from {patterns: name for name, patterns in [*SPLITS.items()][::-1]}.values()


def _patterns(step: object) -> Iterator[str]:
    if not is_object(step):
        return
    inner = step.get("pretokenizers")
    for each in inner if is_list(inner) else ():
        yield from _patterns(each)
    pattern = step.get("pattern")
    if is_object(pattern) and isinstance(text := pattern.get("Regex"), str):
        yield text


def _vocabulary(described: Mapping[str, object], vocab_size: int, folder: str) -> dict[str, object]:
    model = cast(Mapping[str, object], described.get("model") or {})
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise _untranslated(folder, "is no byte-level BPE")
    words = cast(Mapping[str, int], model.get("vocab") or {})
    texts = [f"[PAD{id}]" for id in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    added = cast(list[Mapping[str, object]], described.get("added_tokens") or [])
    highest = max([*words.values(), *(cast(int, each["id"]) for each in added)], default=-1)
    if highest >= vocab_size:
        raise _untranslated(folder, f"has the id {highest:,}, of {vocab_size:,}")
    for text, id in words.items():
        texts[id], kinds[id] = text, _NORMAL
    for each in added:
        id = cast(int, each["id"])
        texts[id] = cast(str, each["content"])
        kinds[id] = _CONTROL if each.get("special") else _USER_DEFINED
    merges = cast(list[object], model.get("merges") or [])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(_pair(m)) for m in merges],
    }


def _pair(merge: object) -> list[str]:
    return [str(part) for part in cast(list[object], merge)]


def _gguf_usage(tokenizer: Tokenizer) -> dict[str, object]:
    lead = tokenizer.encode("x") != tokenizer.encode("x", add_special_tokens=False)
    keys: dict[str, object] = {"tokenizer.ggml.add_bos_token": lead}
    for name, text in tokenizer.facts.chat_templates.items():
        last = "" if name == "default" else f".{name}"
        keys[f"tokenizer.chat_template{last}"] = text
    return keys


def _untranslated(folder: str, why: str) -> ModelError:
    return ModelError(
        f"the tokenizer of {printable(folder, 200)!r} {why}, and is not translated to GGUF",
        hint="choose one of the types that folders have",
    )
