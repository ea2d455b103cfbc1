"""Loads the tokenizer of a model folder: tokenizer.json, or an older vocabulary file
(`tokenizer/vocabulary_files.py`), and the JSON and template files next to it.

Reads the named tokens, the ids that end a generation, and the chat templates.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import cast

import tokenizers
from tokenizers import AddedToken

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.base.os import open_regular
from banyan.tokenizer.tokenizer import NAMED_TOKENS, Tokenizer, TokenizerFacts, build_backend
from banyan.tokenizer.vocabulary_files import FolderVocabulary, read_vocabulary

MAX_TOKENIZER_BYTES = 128 << 20
"""Size of a tokenizer.json; a vocabulary of 262,144 with its merges needs 33 MB."""

MAX_CONFIG_BYTES = 16 << 20
"""Size of each of the other JSON or template files."""


def load_folder_tokenizer(path: str, is_slow: bool = False) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Args:
        is_slow: read the older vocabulary file even if there is a tokenizer.json.

    Raises:
        ModelError: missing, too large or unreadable.
    """
    config = _read_json(os.path.join(path, "tokenizer_config.json"))
    vocabulary = build_backend(path, lambda: _vocabulary(path, config, is_slow))
    backend = vocabulary.backend
    _add_missing(backend, config, path)
    own = _named_tokens(config, _read_json(os.path.join(path, "special_tokens_map.json")))
    named = {**vocabulary.named, **own}
    add_bos = _flag(config, "add_bos_token")
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    extra = extra.values() if isinstance(extra, dict) else extra
    facts = TokenizerFacts(
        source=path,
        named=named,
        eos_ids=_eos_ids(path, backend, named),
        special=tuple(t for t in map(_token_text, cast(Iterable[object], extra)) if t is not None),
        add_bos=vocabulary.add_bos if add_bos is None else add_bos,
        add_eos=_flag(config, "add_eos_token"),
        chat_templates=_chat_templates(path, config),
    )
    return Tokenizer(backend, facts)


def _vocabulary(path: str, config: Mapping[str, object], is_slow: bool) -> FolderVocabulary:
    """Raises:
    ModelError: there is none.
    """
    file = os.path.join(path, "tokenizer.json")
    if os.path.exists(file) and not is_slow:
        text = _read_text(file, MAX_TOKENIZER_BYTES)
        return FolderVocabulary(tokenizers.Tokenizer.from_str(text))
    found = read_vocabulary(path, config)
    if found is None and is_slow:
        raise ModelError(
            f"--tokenizer-mode slow: {printable(path)!r} has no tokenizer.model, tiktoken.model, "
            "tekken.json, or vocab.json with merges.txt",
            "leave it out; tokenizer.json is read then",
        )
    if found is None:
        raise ModelError(
            f"{printable(path)!r} has no tokenizer.json, tokenizer.model, tiktoken.model, "
            "tekken.json, or vocab.json with merges.txt",
            "download the repository's tokenizer files, or name a .gguf file",
        )
    return found


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, object], path: str) -> None:
    """Add tokens that only tokenizer_config.json names."""
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return
    for key, entry in sorted(
        entries.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else -1
    ):
        text = _token_text(entry)
        if text is None or backend.token_to_id(text) is not None:
            continue
        flags = {
            n: bool(entry.get(n))
            for n in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        backend.add_tokens([AddedToken(text, **flags)])
        if str(backend.token_to_id(text)) != key:
            raise ModelError(
                f"tokenizer_config.json of {printable(path)!r} gives {printable(text)!r} the id "
                f"{printable(key)}, tokenizer.json has room for it at {backend.token_to_id(text)}",
                "the two files are of different models; download both again",
            )


def _named_tokens(*configs: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for config in configs:
        for name in NAMED_TOKENS:
            text = _token_text(config.get(name))
            if text is not None:
                found.setdefault(name, text)
    return found


def _token_text(value: object) -> str | None:
    """The text of a token that a file gives as a string or as an object with "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _flag(config: Mapping[str, object], name: str) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else None


def _eos_ids(path: str, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> tuple[int, ...]:
    """Ids that end a generation, from the tokenizer and from the model's configuration files."""
    found: list[object] = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
    configs = [_read_json(os.path.join(path, "generation_config.json"))]
    # It may be encrypted; who reads the model's configuration reports what is wrong with it.
    with contextlib.suppress(ModelError):
        configs.append(_read_json(os.path.join(path, "config.json")))
    for config in configs:
        value = config.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    ids = (id for id in found if type(id) is int and 0 <= id < 1 << 32)
    return tuple(dict.fromkeys(ids))


def _chat_templates(path: str, config: Mapping[str, object]) -> dict[str, str]:
    """Templates by name. A separate file takes precedence over one inside a configuration."""
    found: dict[str, str] = {}
    separate = _read_json(os.path.join(path, "chat_template.json")).get("chat_template")
    for value in (config.get("chat_template"), separate):
        entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
        for entry in entries:
            if not isinstance(entry, dict):
                continue
            name, template = entry.get("name"), entry.get("template")
            if isinstance(name, str) and isinstance(template, str):
                found[name] = template
    file = os.path.join(path, "chat_template.jinja")
    if os.path.exists(file):
        found["default"] = _read_text(file, MAX_CONFIG_BYTES)
    return found


def _read_json(path: str) -> dict[str, object]:
    """The object in an optional JSON file; {} when there is no file."""
    if not os.path.exists(path):
        return {}
    try:
        found = json.loads(_read_text(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{printable(path)!r} is not JSON: {printable(str(error))}", "download it again"
        ) from None
    if not isinstance(found, dict):
        raise ModelError(f"{printable(path)!r} is not a JSON object", "download it again")
    return found


def _read_text(path: str, limit: int) -> str:
    try:
        with open_regular(path) as file:
            raw = file.read(limit + 1)
        if len(raw) > limit:
            raise ModelError(
                f"{printable(path)!r} is larger than the {limit:,} bytes such a file may have",
                "take the file from the model's publisher",
            )
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{printable(path)!r} cannot be read: {printable(str(error))}",
            "check its permissions, or download it again",
        ) from None
