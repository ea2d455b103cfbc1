"""Files of settings: YAML (JSON is a subset), one mapping from name to value."""

from collections.abc import Collection, Hashable
from typing import TypeGuard, cast

from banyan.base.errors import ConfigError

MAX_BYTES = 1 << 20


def read_mapping(path: str, flag: str) -> dict[str, object]:
    """Name as written -> value, of the file that `flag` names.

    Raises:
        ConfigError: the file is missing, too large, not YAML, not a mapping, or has a key twice.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{flag} {path} is larger than {MAX_BYTES:,} bytes")
    return _parse(raw, path)


def _parse(raw: bytes, path: str) -> dict[str, object]:
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """Plain values only; a duplicate key is an error, not a silent choice."""

        def construct_mapping(
            self, node: yaml.MappingNode, deep: bool = False
        ) -> dict[Hashable, object]:
            mapping = super().construct_mapping(node, deep)
            if len(mapping) != len(node.value):
                keys = [key.value for key, _ in node.value]
                twice = next((k for k in keys if keys.count(k) > 1), keys[-1])
                raise ConfigError(f"{path}: {twice} is given twice", hint="keep one of them")
            return mapping

    try:
        loader = UniqueKeys(raw)
        content: object = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path} is not YAML{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{path} is not YAML: it does not parse") from None
    if content is None:
        return {}
    if not _has_names(content):
        raise ConfigError(f"{path} must be a mapping from names to values")
    return content


def _has_names(content: object) -> TypeGuard[dict[str, object]]:
    """Whether it is a mapping all of whose keys are texts; YAML allows other keys too."""
    return isinstance(content, dict) and all(
        isinstance(k, str) for k in cast(Collection[object], content)
    )
