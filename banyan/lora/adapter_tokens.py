"""Single tokens of the base's vocabulary whose rows of the embedding or of the head an adapter in
PEFT's form brings (`trainable_token_indices`), and tokens that the tokenizer beside it has. Reads
headers, no tensors.
"""

import os
import re
from collections.abc import Iterable, Mapping

import msgspec

from banyan.base.errors import ConfigError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import printable
from banyan.formats.safetensors import SafetensorsFile
from banyan.lora.adapter_config import EMBEDDING, TokenRows, check_types
from banyan.model_config.facts import read_json

_KEY = "trainable_token_indices"
_ROWS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(?:\.default)?")
_ID = re.compile(r"[0-9]{1,18}")
_MAX_TOKENS = 1 << 16
_MAX_WORDS_BYTES = 128 << 20
"""Of a tokenizer.json."""


class _Added(msgspec.Struct):
    id: int


class _Words(msgspec.Struct):
    """What is read of a tokenizer.json."""

    added_tokens: list[_Added] = []


def highest_token(path: str) -> int:
    """The highest id that the tokenizer in a folder gives to a token beside its words
    (`added_tokens.json`, `tokenizer_config.json`, `tokenizer.json`); -1 where there is none.

    Raises:
        ConfigError, ModelError: a file of the tokenizer cannot be read.
    """
    plain = read_json(os.path.join(path, "added_tokens.json"), is_needed=False)
    config = read_json(os.path.join(path, "tokenizer_config.json"), is_needed=False)
    decoder = config.get("added_tokens_decoder")
    return max(
        _highest(plain.values()),
        _highest(int(name) for name in decoder if _ID.fullmatch(name))
        if is_object(decoder)
        else -1,
        _highest(token.id for token in _words(path).added_tokens),
    )


def _highest(ids: Iterable[object]) -> int:
    return max((token for token in ids if type(token) is int), default=-1)


def _words(path: str) -> _Words:
    name = os.path.join(path, "tokenizer.json")
    try:
        with open(name, "rb") as file:
            raw = file.read(_MAX_WORDS_BYTES + 1)
        if len(raw) > _MAX_WORDS_BYTES:
            raise ConfigError(f"{printable(name)!r} is larger than {_MAX_WORDS_BYTES:,} bytes")
        return msgspec.json.decode(raw, type=_Words)
    except FileNotFoundError:
        return _Words()
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {printable(name)!r}: {printable(str(error), 100)}",
            hint="save or download it again, or take the tokenizer out of the folder",
        ) from None


def module_of_tokens(name: str) -> str:
    """The module whose rows a tensor of a file brings; "" for other tensors."""
    match = _ROWS.fullmatch(name)
    return match.group(1) if match else ""


def token_rows(
    file: SafetensorsFile, names: Mapping[str, str], raw: Mapping[str, object], folder: str
) -> dict[str, TokenRows]:
    """By module, with the ids that the configuration names.

    Args:
        names: module -> its tensor.

    Raises:
        ConfigError: configuration and tensors do not belong together.
    """
    asked = _asked(raw.get(_KEY), folder)
    found: dict[str, TokenRows] = {}
    for module, name in names.items():
        key = next((key for key in asked if module == key or module.endswith(f".{key}")), None)
        tensor = file.tensors[name]
        check_types((tensor,), folder)
        ids = asked.pop(key) if key is not None else ()
        if len(tensor.shape) != 2 or tensor.shape[0] != len(ids) or not ids:
            raise ConfigError(
                f"adapter {folder!r}: {printable(module, 100)} has rows of tokens of "
                f"{list(tensor.shape)}, and {_KEY} names {len(ids)} tokens of it",
                hint="the configuration and the weights do not belong together",
            )
        found[module] = TokenRows(name, ids, tensor.shape[1])
    if asked:
        raise ConfigError(
            f"adapter {folder!r} lacks the rows of the tokens that {_KEY} names of "
            f"{printable(next(iter(asked)), 100)}",
            hint="save or download it again",
        )
    return found


def _asked(given: object, folder: str) -> dict[str, tuple[int, ...]]:
    """Last parts of modules' names -> ids."""
    if given in (None, [], {}):
        return {}
    by_name = given if is_object(given) else {EMBEDDING: given}
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in by_name.items():
        are_ids = is_list(ids) and all(type(token) is int and token >= 0 for token in ids)
        if not are_ids or not is_list(ids) or not 0 < len(ids) <= _MAX_TOKENS:
            raise ConfigError(
                f"adapter {folder!r}: {_KEY} must list 1 to {_MAX_TOKENS:,} ids of tokens",
                hint="save or download it again",
            )
        chosen = tuple(token for token in ids if isinstance(token, int))
        if len(set(chosen)) < len(chosen):
            raise ConfigError(
                f"adapter {folder!r}: {_KEY} names a token twice",
                hint="save or download it again",
            )
        found[name] = chosen
    return found
