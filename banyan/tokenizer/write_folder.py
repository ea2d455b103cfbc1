"""Writes the vocabulary of a GGUF file as the files of a folder: tokenizer.json,
tokenizer_config.json, the chat template and generation_config.json. Other readers get the same ids.
"""

import json
from collections.abc import Mapping

from tokenizers.processors import TemplateProcessing

from banyan.formats.gguf import GGUFFile
from banyan.tokenizer.gguf_tokenizer import GGUFVocabulary
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
    if tokenizer.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.chat_template.encode()
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
