"""Single tokens of the base's vocabulary whose rows of the embedding or of the head an adapter in
PEFT's form brings (`trainable_token_indices`). Reads headers, no tensors.
"""

import re
from collections.abc import Mapping

from banyan.base.errors import ConfigError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import printable
from banyan.config.adapter_card import EMBEDDING, TokenRows, check_types
from banyan.formats.safetensors import SafetensorsFile

_KEY = "trainable_token_indices"
_ROWS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(?:\.default)?")
_MAX_TOKENS = 1 << 16


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
