"""From a command line, the environment and a file of flags to a Config.

The command line wins over the environment, which wins over the file. Every flag has an effect, is
accepted with a line that says why it needs none, or is refused; unknown ones are errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.env import Environment
from banyan.config.file import read_flag_file
from banyan.config.flags.flag import SWITCH, Flag
from banyan.config.flags.table import CONFIG_FILE, GROUPS, Foreign, find, most_words, spellings
from banyan.config.schema import Config


@dataclass
class _Layer:
    """The values one origin gave, by schema field."""

    values: dict[str, object] = field(default_factory=dict)
    spelled: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Schema field -> (flag name as looked up, spelling), to find contradictions."""

    def put(self, flag: Flag, value: object, name: str, spelled: str) -> None:
        if flag.kind == SWITCH and not isinstance(flag.sets, bool):
            value = flag.sets if value else default_of(flag)
        first = self.spelled.get(flag.field)
        if first and first[0] != name and self.values[flag.field] != value:
            raise ConfigError(f"{first[1]} and {spelled} disagree", hint="give only one of them")
        self.values[flag.field] = value
        self.spelled[flag.field] = (name, spelled)


@dataclass
class _Reading:
    """What one start has read so far: notes for people, and the layers, weakest last."""

    notes: list[str] = field(default_factory=list)
    config_file: str = ""

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def parse(argv: Sequence[str], environment: Environment) -> Config:
    """Config of a server started with `argv`; what had no effect stands in `observe.notes`.

    One word without dashes is the model.

    Raises:
        ConfigError: an unknown, absent or contradictory flag, or a value that is not legal.
    """
    reading = _Reading()
    command_line = _read_arguments(argv, reading)
    variables = _read_variables(environment, reading)
    file = _read_file(reading.config_file, reading) if reading.config_file else _Layer()
    values = {**file.values, **variables.values, **command_line.values}
    config = build(values)
    return replace(config, observe=replace(config.observe, notes=tuple(reading.notes)))


def build(values: Mapping[str, object]) -> Config:
    """Config with `values` ("part.field" -> value) over the defaults."""
    config = Config()
    for part in fields(Config):
        own = {
            name.partition(".")[2]: value
            for name, value in values.items()
            if name.partition(".")[0] == part.name
        }
        if own:
            config = replace(config, **{part.name: replace(getattr(config, part.name), **own)})
    return config


def default_of(flag: Flag) -> object:
    part, _, name = flag.field.partition(".")
    return getattr(getattr(Config(), part), name)


def help_text() -> str:
    """Every flag that has an effect, by group, with its default."""
    lines = [f"  --{CONFIG_FILE} FILE", "      YAML or JSON file of flags; the command line wins"]
    for title, flags in GROUPS:
        lines += ["", f"{title}:"]
        for flag in flags:
            names = ", ".join(f"--{n}" for n in (flag.name, *flag.aliases))
            lines.append(f"  {names} {flag.metavar}".rstrip())
            lines.append(f"      {flag.help}{_default_text(flag)}")
    return "\n".join(lines)


def _default_text(flag: Flag) -> str:
    default = default_of(flag)
    unset = default in ("", 0) and "default:" in flag.help
    if flag.kind == SWITCH or unset or default in ("", {}):
        return ""
    return f" [{'no bound' if flag.name == 'max-queued-requests' else default}]"


def _read_arguments(argv: Sequence[str], reading: _Reading) -> _Layer:
    layer = _Layer()
    positional = ""
    for spelled, texts in _split(argv):
        if not spelled:
            if positional:
                raise ConfigError(
                    f"unexpected argument {printable(texts[0], 60)!r}", hint="name one model"
                )
            positional = texts[0]
            continue
        name = spelled[2:].replace("_", "-")
        if name == CONFIG_FILE:
            reading.config_file = _single(texts, spelled)
            continue
        known = find(name, abbreviate=True)
        if name not in spellings():
            reading.note(f"{spelled} is read as --{known.name}")
        if isinstance(known, Foreign):
            _meet_foreign(known, " ".join(texts) if texts else "true", spelled, reading)
            continue
        _note_old_name(known, name, spelled, reading)
        text = "true" if known.kind == SWITCH and not texts else _single(texts, spelled)
        layer.put(known, known.from_text(text, spelled), name, spelled)
    if positional:
        model = spellings()["model-path"]
        assert isinstance(model, Flag)
        layer.put(model, model.from_text(positional, "MODEL"), "MODEL", f"MODEL {positional}")
    return layer


def _split(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag as spelled, its texts) for each flag; ("", [word]) for a word that belongs to none."""
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("--"):
            if word.startswith("-"):
                raise ConfigError(f"unknown flag {printable(word, 60)}", hint="see --help")
            yield "", [word]
            continue
        spelled, equals, text = word.partition("=")
        name = spelled[2:].replace("_", "-")
        if equals:
            yield spelled, [text]
            continue
        most = 1 if name == CONFIG_FILE else most_words(find(name, abbreviate=True))
        texts: list[str] = []
        while at < len(argv) and len(texts) < most and not argv[at].startswith("--"):
            texts.append(argv[at])
            at += 1
        if most and not texts:
            raise ConfigError(f"{spelled} needs a value")
        yield spelled, texts


def _single(texts: list[str], spelled: str) -> str:
    if not texts or not texts[0]:
        raise ConfigError(f"{spelled} needs a value")
    return texts[0]


def _read_variables(environment: Environment, reading: _Reading) -> _Layer:
    layer = _Layer()
    for name, text in environment.flags.items():
        spelled = "BANYAN_" + name.upper().replace("-", "_")
        known = spellings().get(name)
        if name == CONFIG_FILE:
            reading.config_file = reading.config_file or text
        elif isinstance(known, Flag):
            layer.put(known, known.from_text(text, spelled), name, spelled)
        else:
            reading.note(f"{spelled} is set and has no effect: there is no such flag")
    for name in environment.idle:
        reading.note(f"{name} is set and has no effect in this build")
    return layer


def _read_file(path: str, reading: _Reading) -> _Layer:
    layer = _Layer()
    for key, value in read_flag_file(path).items():
        name = key.replace("_", "-").removeprefix("--")
        spelled = f"{key} (in {path})"
        try:
            known = find(name, abbreviate=False)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.text}", hint=error.hint) from None
        if value is None:
            continue
        if isinstance(known, Foreign):
            _meet_foreign(known, _as_text(value), spelled, reading)
            continue
        _note_old_name(known, name, spelled, reading)
        layer.put(known, known.check(value, spelled), name, spelled)
    return layer


def _meet_foreign(known: Foreign, text: str, spelled: str, reading: _Reading) -> None:
    """Accept with a note, or raise."""
    if known.reason:
        reading.note(f"{spelled} is accepted without an effect: {known.reason}")
    elif text in known.neutral or (known.is_switch and text.lower() == "false"):
        reading.note(f"{spelled} {text} is accepted: it asks for what is so already")
    else:
        raise known.refusal(spelled)


def _note_old_name(known: Flag, name: str, spelled: str, reading: _Reading) -> None:
    if name in known.old:
        reading.note(f"{spelled} is an old name of --{known.name}")


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
