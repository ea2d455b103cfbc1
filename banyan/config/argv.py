"""Words of a command line and entries of a settings file, by the flags that they belong to.

A flag takes as many words as its kind has, a list only those that it can take, and a switch a word
that says true or false. What is left over is the model. Where a word could be both, nothing is
guessed. A settings file is YAML (JSON is a subset): one mapping from name to value.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.flags.flag import FLOAT, FLOATS, INT, INTS, LISTS, SWITCH, WORDS, Form
from banyan.config.flags.table import CONFIG_FILE, find

MODEL_HINT = "name the model in front, or with --model-path"
MAX_BYTES = 1 << 20
_MAX_DIGITS = 40
_MAX_DEPTH = 16


@dataclass(frozen=True)
class Said:
    """One flag as it was written, or a word that belongs to none.

    Attributes:
        spelled: with its dashes; "" for a word that belongs to none.
        words: what the flag is given, or that one word.
        may_hold_model: the last of its words might as well be the model.
    """

    spelled: str
    words: tuple[str, ...]
    may_hold_model: bool = False


def plain(spelled: str) -> str:
    """A flag's name as the tables write it."""
    return spelled.removeprefix("--").replace("_", "-")


def split(argv: Sequence[str]) -> Iterator[Said]:
    """The words of a command line by the flags that they belong to.

    Raises:
        ConfigError: an unknown flag, one without its value, or with two where it has one.
    """
    at = 0
    before: tuple[str, Form] | None = None
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("--"):
            if word.startswith("-"):
                raise ConfigError(f"unknown flag {printable(word, 60)}", hint="see --help")
            if before is not None:
                _check_leftover(word, *before)
            yield Said("", (word,))
            continue
        spelled, equals, text = word.partition("=")
        name = plain(spelled)
        form = Form(CONFIG_FILE) if name == CONFIG_FILE else find(name, abbreviate=True)
        words = [text] if equals else _words_of(form, argv[at:])
        at += 0 if equals else len(words)
        if form.kind != SWITCH and not words:
            raise ConfigError(f"{spelled} needs a value")
        is_open = form.kind == WORDS and not (form.choices or form.pattern)
        might = is_open and len(words) > 1 and not words[-1].replace(".", "").isdigit()
        yield Said(spelled, tuple(words), might)
        before = (spelled, form) if not equals else None


def _words_of(form: Form, following: Sequence[str]) -> list[str]:
    """The following words that the flag takes."""
    words: list[str] = []
    for word in following:
        if word.startswith("--"):
            break
        is_more = form.kind == SWITCH or bool(words)
        if is_more and not form.takes(word):
            break
        words.append(word)
        if form.kind not in LISTS:
            break
    return words


def _check_leftover(word: str, spelled: str, form: Form) -> None:
    """Refuse a word that is no model, but one more value of the flag before it."""
    is_number = form.kind in (INT, FLOAT, INTS, FLOATS) and Form("", kind=FLOAT).takes(word)
    if is_number or (form.choices and form.takes(word)):
        raise ConfigError(
            f"{spelled} does not take {printable(word, 60)!r} as well",
            hint=f"if it is the model, {MODEL_HINT}",
        )


def read_mapping(path: str, flag: str) -> dict[str, object]:
    """Name as written -> value, of the file that `flag` names.

    Raises:
        ConfigError: the file is missing, too large, not YAML, not a mapping, or has a key twice.
    """
    return _parse(_read(path, flag), path)


def read_plain_mapping(path: str, flag: str) -> dict[str, object]:
    """Like `read_mapping`, for files that are read while a server runs.

    It is ten times as fast, and other threads run between its steps. Anchors and tags are refused.
    """
    return _checked(_with_marks(lambda: _plain_value(_read(path, flag), path), path), path)


def _read(path: str, flag: str) -> bytes:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{flag} {path} is larger than {MAX_BYTES:,} bytes")
    return raw


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

        def construct_whole_number(self, node: yaml.ScalarNode) -> int:
            if len(str(node.value)) > _MAX_DIGITS:
                line = node.start_mark.line + 1
                raise ConfigError(
                    f"{path}, line {line}: a number of more than {_MAX_DIGITS} digits"
                )
            return self.construct_yaml_int(node)

    UniqueKeys.add_constructor("tag:yaml.org,2002:int", UniqueKeys.construct_whole_number)
    return _checked(_with_marks(lambda: UniqueKeys(raw).get_single_data(), path), path)


def _with_marks(load: Callable[[], object], path: str) -> object:
    """The result of `load`; ConfigError with the line if the file is not YAML."""
    import yaml

    try:
        return load()
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path} is not YAML{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{path} is not YAML: it does not parse") from None


def _plain_value(raw: bytes, path: str) -> object:
    """The value of a file of plain YAML, from its events."""
    import yaml

    loader: Any = yaml.CSafeLoader(raw) if yaml.__with_libyaml__ else yaml.SafeLoader(raw)
    for event in (yaml.StreamStartEvent, yaml.DocumentStartEvent):
        if not loader.check_event(event):
            return None
        loader.get_event()
    value = _next_value(loader, path)
    loader.get_event()  # the end of the document
    if not loader.check_event(yaml.StreamEndEvent):
        raise ConfigError(f"{path} has more than one document")
    return value


def _next_value(loader: Any, path: str, depth: int = 0) -> object:
    import yaml

    event: Any = loader.get_event()
    line = event.start_mark.line + 1
    has_tag = isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent) and event.tag
    if (isinstance(event, yaml.NodeEvent) and event.anchor) or has_tag or depth > _MAX_DEPTH:
        raise ConfigError(f"{path}, line {line}: anchors, tags and deep nesting are not accepted")
    if isinstance(event, yaml.SequenceStartEvent):
        found: list[object] = []
        while not loader.check_event(yaml.SequenceEndEvent):
            found.append(_next_value(loader, path, depth + 1))
        loader.get_event()
        return found
    if isinstance(event, yaml.MappingStartEvent):
        named: dict[object, object] = {}
        while not loader.check_event(yaml.MappingEndEvent):
            key = _next_value(loader, path, depth + 1)
            if not isinstance(key, Hashable):
                raise ConfigError(f"{path}, line {line}: a key is no text")
            if key in named:
                raise ConfigError(f"{path}: {key} is given twice", hint="keep one of them")
            named[key] = _next_value(loader, path, depth + 1)
        loader.get_event()
        return named
    if not isinstance(event, yaml.ScalarEvent):
        raise ConfigError(f"{path}, line {line}: there is no value")
    tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)
    return loader.construct_object(yaml.ScalarNode(tag, event.value))


def _checked(content: object, path: str) -> dict[str, object]:
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
