"""CheckpointFields: typed and bounded access to the fields of a checkpoint's configuration.

Checkpoints are untrusted input: every value is checked here, and errors name the key.
"""

import json
import sys
from collections.abc import Mapping

from banyan.base.errors import ModelError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import printable
from banyan.base.os import open_regular

MAX_CONFIG_BYTES = 4 << 20


class CheckpointFields:
    """A mapping from keys to untrusted values.

    Args:
        values: the file's content.
        where: the file, for messages.
        prefix: put before every key that is read ("llama.").
        asked: collects the keys that are read, prefix included.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        where: str,
        prefix: str = "",
        asked: set[str] | None = None,
    ) -> None:
        self._values = values
        self.where = where
        self._prefix = prefix
        self._asked = set[str]() if asked is None else asked

    def with_values(self, more: Mapping[str, object]) -> "CheckpointFields":
        """A copy with some values replaced."""
        named = {self._prefix + key: value for key, value in more.items()}
        return CheckpointFields({**self._values, **named}, self.where, self._prefix, self._asked)

    def has(self, key: str) -> bool:
        return self._get(key, None) is not None

    def states(self, key: str) -> bool:
        """Whether the key is present, even as null."""
        self._asked.add(self._prefix + key)
        return self._prefix + key in self._values

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "a whole number")
        if not low <= value <= high:
            raise self.error(key, value, f"in [{low:,}, {high:,}]")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, value, "a number")
        if not low <= value <= high or abs(value) > sys.float_info.max:
            raise self.error(key, value, f"in [{low:g}, {high:g}]")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a text")
        return value

    def listed(self, key: str) -> list[object]:
        """A list; [] when the key is absent."""
        value = self._get(key, [])
        if not is_list(value):
            raise self.error(key, value, "a list")
        return value

    def any(self, key: str) -> object:
        """The unchecked value; None when the key is absent."""
        return self._get(key, None)

    def part(self, key: str) -> "CheckpointFields | None":
        """A nested mapping; None when the key is absent."""
        if not self.has(key):
            return None
        value = self._values[self._prefix + key]
        if not is_object(value):
            raise self.error(key, value, "a mapping")
        return CheckpointFields(value, f"{self.where}, {key}")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids; () when the key is absent."""
        if not self.has(key):
            return ()
        value = self._values[self._prefix + key]
        ids = value if is_list(value) else [value]
        good = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
        if len(good) != len(ids) or len(ids) > 1000 or not all(0 <= i < vocab_size for i in good):
            raise self.error(key, value, f"token ids in [0, {vocab_size:,})")
        return tuple(dict.fromkeys(good))

    def error(self, key: str, value: object, rule: str) -> ModelError:
        said = "it is missing" if value is None else f"got {printable(repr(value), 80)}"
        return ModelError(
            f"{printable(self.where)}: {self._prefix}{key} must be {rule}; {said}",
            hint="the file is damaged or of another kind; download it again",
        )

    def _get(self, key: str, default: object) -> object:
        self._asked.add(self._prefix + key)
        value = self._values.get(self._prefix + key)
        return default if value is None else value


def shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 for 9.9999997e-06."""
    return float(f"{value:.7g}")


def read_json(path: str, *, is_needed: bool, limit: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """The object in a JSON file of at most `limit` bytes; {} when it is missing and not needed."""
    name = printable(path)
    try:
        with open_regular(path) as file:
            raw = file.read(limit + 1)
    except FileNotFoundError:
        if not is_needed:
            return {}
        raise ModelError(
            f"{name!r} is missing", hint="name a folder that holds config.json and *.safetensors"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {name!r}: {error.strerror}") from None
    if len(raw) > limit:
        raise ModelError(f"{name!r} is larger than {limit:,} bytes")
    try:
        content: object = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelError(f"{name!r} is not JSON", hint="download it again") from None
    if not is_object(content):
        raise ModelError(f"{name!r} must hold a JSON object", hint="download it again")
    return content
