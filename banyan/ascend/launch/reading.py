"""Arguments of a launch, from a command line or from a Config, by the names of the flag tables.

A plan may ask for what this build has not: nothing is refused here but words that are no flags, and
values that no flag takes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.argv import plain, read_mapping, split
from banyan.config.cli import default_of, value_of
from banyan.config.env import Environment
from banyan.config.flags.flag import LISTS, Replaced
from banyan.config.flags.table import CONFIG_FILE, GROUPS, Known, find, spellings
from banyan.config.schema import Config

MODEL = "model-path"
_MOST_BYTES = 1 << 16


def arguments_of_words(argv: Sequence[str], environment: Environment) -> dict[str, object]:
    """Flag -> value; the command line over variables over files, as a start reads them.

    Raises:
        ConfigError: an unknown flag, or a value that it does not take.
    """
    said: dict[str, object] = {}
    files: list[str] = []
    for part in split(argv):
        name = plain(part.spelled)
        if not part.spelled:
            said[MODEL] = part.words[0]
        elif name == CONFIG_FILE:
            files += part.words
        else:
            known = find(name, abbreviate=True)
            _put(known, _value(known, part.words, part.spelled), said)
    variables: dict[str, object] = {}
    for name, text in environment.flags.items():
        known = spellings().get(name)
        if known is not None and text:
            words = text.split() if known.kind in LISTS else [text]
            _put(known, _value(known, words, name), variables)
    in_files: dict[str, object] = {}
    for path in files:
        for key, value in read_mapping(path, f"--{CONFIG_FILE}").items():
            known = find(plain(key), abbreviate=False)
            if value is not None:
                _put(
                    known, value if _is_others(known, value) else known.check(value, key), in_files
                )
    return {**in_files, **variables, **said}


def arguments_of_config(config: Config) -> dict[str, object]:
    """The same for a start whose flags are read: those that are not what nobody said."""
    return {
        flag.name: value
        for _, flags in GROUPS
        for flag in flags
        if (value := value_of(config, flag)) != default_of(flag)
    }


def _value(known: Known, words: Sequence[str], spelled: str) -> object:
    """As of any flag; what other builds take and this one has not is taken as it is written."""
    if words and _is_others(known, words[0]):
        return words[0]
    return known.from_words(words, spelled)


def _is_others(known: Known, value: object) -> bool:
    return any(value in other.values.split() for other in known.elsewhere)


def _put(known: Known, value: object, into: dict[str, object]) -> None:
    if isinstance(known, Replaced):
        if value is not False:
            into[known.successor] = known.value
    else:
        into[known.name] = value


def read_variables(path: str) -> Mapping[str, str]:
    """A file of NAME=VALUE lines, as containers and shells take them.

    Raises:
        ConfigError: it cannot be read, or a line is none of these.
    """
    try:
        text = Path(path).read_bytes()[: _MOST_BYTES + 1]
    except OSError as error:
        raise ConfigError(f"cannot read --env {path}: {error.strerror}") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"--env {path} is larger than {_MOST_BYTES:,} bytes")
    return dict(_lines(text.decode("utf-8", "replace"), path))


def _lines(text: str, path: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        given = line.strip().removeprefix("export ").strip()
        if not given or given.startswith("#"):
            continue
        name, equals, value = given.partition("=")
        if not equals or not name.strip().replace("_", "").isalnum():
            raise ConfigError(
                f"--env {path}, line {number}: {printable(given, 60)!r} is not NAME=VALUE"
            )
        yield name.strip(), value.strip().strip("\"'")
