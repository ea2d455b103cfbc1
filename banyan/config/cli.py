"""From a command line, the environment and a file of flags to a Config.

The command line wins over the environment, which wins over the file. Every flag has an effect, is
accepted with a line that says why it needs none, or is refused; unknown ones are errors.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.argv import MODEL_HINT, plain, read_mapping, split
from banyan.config.devices import choose_device, facts_of, outcome_device
from banyan.config.env import Environment
from banyan.config.flags.flag import FLOAT, INT, LISTS, SWITCH, TEXT, Absent, Flag, Replaced
from banyan.config.flags.outcome import (
    DEFAULT,
    MISSING,
    REFUSED,
    WORKS,
    Outcome,
    outcome_of,
    remark,
)
from banyan.config.flags.table import CONFIG_FILE, GROUPS, Known, find, spellings
from banyan.config.rules.ignored import ignored_flags
from banyan.config.schema import UNSAID, Config
from banyan.config.variables import SETTINGS

_SECRET = ("api-key", "admin-api-key", "ssl-keyfile-password")


@dataclass(frozen=True)
class Given:
    """What a start was given.

    Attributes:
        config: the defaults with everything that was given over them.
        origins: schema field -> where its value comes from; absent for defaults.
    """

    config: Config
    origins: Mapping[str, str]


@dataclass
class _Layer:
    """The values one origin gave."""

    origin: str
    """Where its values come from; {} stands for the spelling."""
    values: dict[str, object] = field(default_factory=dict[str, object])
    """By schema field."""
    origins: dict[str, str] = field(default_factory=dict[str, str])
    seen: dict[str, tuple[str, object]] = field(default_factory=dict[str, tuple[str, object]])
    """Schema field, or absent flag -> (spelling, value), to find contradictions."""

    def put(self, flag: Flag, value: object, spelled: str) -> None:
        origin = self.origin.format(spelled)
        if flag.kind == SWITCH and not isinstance(flag.sets, bool):
            if not value:  # leaves the field to its default, and to the flags that share it
                self.values.setdefault(flag.field, default_of(flag))
                self.origins.setdefault(flag.field, origin)
                return
            value = flag.sets
        self.compare(flag.field, value, spelled)
        self.values[flag.field] = value
        self.origins[flag.field] = origin

    def compare(self, name: str, value: object, spelled: str) -> None:
        """Refuse two spellings that disagree; of one spelling, the last one wins."""
        first, before = self.seen.get(name, (spelled, value))
        if first != spelled and before != value:
            raise ConfigError(f"{first} and {spelled} disagree", hint="give only one of them")
        self.seen[name] = (spelled, value)


@dataclass
class _Reading:
    """What one start has read so far: notes for people, refusals, and the file that was named."""

    notes: list[str] = field(default_factory=list[str])
    given: dict[str, tuple[Absent, object]] = field(
        default_factory=dict[str, tuple[Absent, object]]
    )
    """Spelling -> the flag without an effect of its own, and its value."""
    illegal: list[ConfigError] = field(default_factory=list[ConfigError])
    """Values that flags do not take, kept for the end like the refusals."""
    files: list[str] = field(default_factory=list[str])
    """Files of flags; what a later one says holds."""
    translated: dict[str, str] = field(default_factory=dict[str, str])
    """Flag -> the spelling of its value that was given, where it is another's."""
    open_lists: dict[str, str] = field(default_factory=dict[str, str])
    """Flag -> the last word of its list, where that might be the model."""

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def parse(argv: Sequence[str], environment: Environment) -> Config:
    """Config of a server started with `argv`; `observe.notes` lists flags without effect.

    One word without dashes is the model.

    Raises:
        ConfigError: an unknown, absent or contradictory flag, or a value that is not legal.
    """
    return read(argv, environment).config


def read(argv: Sequence[str], environment: Environment) -> Given:
    """As `parse`, with the origin of every value."""
    reading = _Reading()
    command_line = _read_arguments(argv, reading)
    variables = _read_variables(environment, reading)
    file = _read_files(reading)
    values = {**file.values, **variables.values, **command_line.values}
    config = choose_device(build(values), environment)
    origins = {**file.origins, **variables.origins, **command_line.origins}
    outcomes = _outcomes(reading, config, origins, outcome_device(config, environment))
    refusals = {name: each for name, each in outcomes.items() if each.verdict == REFUSED}
    if refusals or environment.refusals:
        also = [error.text for error in reading.illegal]
        raise _refusal(refusals, [*environment.refusals, *also])
    if reading.illegal:
        text = "; ".join(error.text for error in reading.illegal)
        raise ConfigError(text, hint=reading.illegal[0].hint)
    _check_open_lists(reading, values)
    said = [*reading.notes, *(_accepted(name, each) for name, each in outcomes.items())]
    if own_variables := facts_of(config).variables:
        if environment.npu_refusals:
            raise ConfigError("; ".join(environment.npu_refusals))
        others = (note for note in said if note.partition(" ")[0] not in own_variables)
        said = [*others, *environment.npu_notes]
    reported = {note.partition(" ")[0] for note in said}
    ignored = ignored_flags(config, origins, environment)
    notes = (*said, *(note for note in ignored if note.partition(" ")[0] not in reported))
    config = replace(config, observe=replace(config.observe, notes=notes, origins=origins))
    return Given(config, origins)


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


def value_of(config: Config, flag: Flag) -> object:
    """What the schema field of `flag` holds."""
    part, _, name = flag.field.partition(".")
    return getattr(getattr(config, part), name)


def default_of(flag: Flag) -> object:
    return value_of(Config(), flag)


def described(config: Config) -> dict[str, object]:
    """Every setting once, called as in SGLang's: the flag with underscores, `tp_size` for
    --tensor-parallel-size. None where a flag that is not given leaves it to others."""
    return {
        name_of(flag): shown(flag, value_of(config, flag))
        for _, flags in GROUPS
        for flag in flags
        if flag.name not in _SECRET
    }


def origins(config: Config) -> dict[str, str]:
    """Who has set each of these settings."""
    said = config.observe.origins
    return {
        name_of(flag): said.get(flag.field, "default")
        for _, flags in GROUPS
        for flag in flags
        if flag.name not in _SECRET
    }


def name_of(flag: Flag) -> str:
    short = (
        alias for alias in flag.aliases if flag.name.endswith("-parallel-size") and "-" in alias
    )
    return next(short, flag.name).replace("-", "_")


def shown(flag: Flag, value: object) -> object:
    """The value as --config takes it; None where the flag is not to be given, and of secrets."""
    if flag.name in _SECRET:
        return None
    if flag.kind == SWITCH:
        return value == flag.sets
    is_open = value in ("", ()) or (value == 0 and flag.low > 0)
    return None if is_open else value


def help_text() -> str:
    """Every flag that has an effect, by group, with its default."""
    wrapped = partial(textwrap.wrap, width=98, break_on_hyphens=False, subsequent_indent=" " * 6)
    lines = [f"  --{CONFIG_FILE} FILE", "      YAML or JSON file of flags; the command line wins"]
    for title, flags in GROUPS:
        lines += ["", f"{title}:"]
        for flag in flags:
            names = ", ".join(f"--{n}" for n in (flag.name, *flag.aliases))
            lines += wrapped(f"  {names} {flag.metavar.replace('|', ' | ')}")
            lines += wrapped(f"      {flag.help}{_default_text(flag)}{remark(flag)}")
    return "\n".join(lines)


def _default_text(flag: Flag) -> str:
    default = default_of(flag)
    unset = default in ("", 0, UNSAID) and "default:" in flag.help
    if flag.kind == SWITCH or unset or default in ("", {}, ()):
        return ""
    return f" [{'no bound' if flag.name == 'max-queued-requests' else default}]"


def _read_arguments(argv: Sequence[str], reading: _Reading) -> _Layer:
    layer = _Layer("flag {}")
    positional = ""
    for said in split(argv):
        spelled, words = said.spelled, said.words
        if not spelled:
            if positional:
                raise ConfigError(
                    f"unexpected argument {printable(words[0], 60)!r}", hint="name one model"
                )
            positional = words[0]
            continue
        name = plain(spelled)
        if name == CONFIG_FILE:
            if not words[0]:
                raise ConfigError(f"{spelled} needs a value")
            reading.files.append(words[0])
            continue
        known = find(name, abbreviate=True)
        if name not in spellings():
            reading.note(f"{spelled} is read as --{known.name}")
        if said.may_hold_model:
            reading.open_lists[spelled] = words[-1]
        _take(known, words, name, spelled, layer, reading)
    if positional:
        model = find("model-path", abbreviate=False)
        _meet(model, model.check(positional, "MODEL"), "", f"MODEL {positional}", layer, reading)
    return layer


def _read_variables(environment: Environment, reading: _Reading) -> _Layer:
    layer = _Layer("variable {}")
    for name, text in environment.flags.items():
        spelled = "BANYAN_" + name.upper().replace("-", "_")
        known = spellings().get(name)
        if name == CONFIG_FILE:
            reading.files.insert(0, text)
        elif not text:
            continue  # set to nothing, as an empty entry of a compose file does
        elif known is None:
            reading.note(f"{spelled} is set and has no effect: there is no such flag")
        else:
            words = [text] if known.kind not in LISTS else text.split()
            _take(known, words, name, spelled, layer, reading)
    for name, text in environment.settings.items():
        setting = SETTINGS[name]
        layer.put(setting, setting.from_words([text], name), name)
    for note in environment.notes:
        reading.note(note)
    return layer


def _read_files(reading: _Reading) -> _Layer:
    """What the files say together: of two that set one flag, the later holds."""
    whole = _Layer("")
    for path in reading.files:
        layer = _Layer("file " + path.replace("{", "{{").replace("}", "}}"))
        _read_file(path, layer, reading)
        whole.values |= layer.values
        whole.origins |= layer.origins
    return whole


def _read_file(path: str, layer: _Layer, reading: _Reading) -> None:
    for key, value in read_mapping(path, "--config").items():
        name = plain(key)
        if name == CONFIG_FILE:
            raise ConfigError(
                f"{path}: a file of flags names no other", hint="give --config once for each file"
            )
        try:
            known = find(name, abbreviate=False)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.text}", hint=error.hint) from None
        if value is None:
            continue
        spelled = f"{key} (in {path})"
        try:
            _meet(known, known.check(value, spelled), name, spelled, layer, reading)
        except ConfigError as error:
            reading.illegal.append(error)
            continue
        _note_translation(known, value, spelled, reading)


def _check_open_lists(reading: _Reading, values: Mapping[str, object]) -> None:
    """Refuse to guess whether the last word of a list is the model, where nothing else names it."""
    for spelled, last in reading.open_lists.items():
        if "model.source" not in values:
            raise ConfigError(
                f"{spelled} … {printable(last, 60)}: its last word may be the model",
                hint=MODEL_HINT,
            )


def _take(
    known: Known,
    words: Sequence[str],
    name: str,
    spelled: str,
    layer: _Layer,
    reading: _Reading,
) -> None:
    """Read the words that follow a flag; what it does not take is kept for the end."""
    try:
        value = known.from_words(words, spelled)
    except ConfigError as error:
        reading.illegal.append(error)
        return
    _meet(known, value, name, spelled, layer, reading)
    if words:
        _note_translation(known, words[0], spelled, reading)


def _note_translation(known: Known, value: object, spelled: str, reading: _Reading) -> None:
    for theirs, ours in known.translate:
        if value == theirs:
            reading.note(f"{spelled} {theirs} is read as {ours}")
            reading.translated[known.name] = theirs


def _meet(
    known: Known, value: object, name: str, spelled: str, layer: _Layer, reading: _Reading
) -> None:
    """Take the value in, accept it with a note, or keep the refusal for the end."""
    old = ""
    if isinstance(known, Replaced):
        if value is False:
            reading.note(f"{spelled} false is accepted: this is the default")
            return
        old = f" (--{known.successor} {known.value})"
        reading.note(f"{spelled} is an old name of --{known.successor} {known.value}")
        known, value = find(known.successor, abbreviate=False), known.value
        value = known.check(value, spelled)
    elif name in known.old:
        reading.note(f"{spelled} is an old name of --{known.name}")
    if isinstance(known, Flag):
        layer.put(known, value, spelled)
    elif isinstance(known, Absent):
        layer.compare(known.name, value, spelled)
        reading.given[spelled + old] = (known, value)


def _outcomes(
    reading: _Reading, config: Config, origins: Mapping[str, str], device: str
) -> dict[str, Outcome]:
    """The outcome on a device of each given flag that does not simply work, by its spelling."""
    found: dict[str, Outcome] = {}
    for spelled, (known, value) in reading.given.items():
        outcome = outcome_of(known, value, device)
        is_default = known.asks_for_nothing(value)
        has_values = outcome.verdict == REFUSED and (known.neutral or known.choices)
        is_shown = is_default or (has_values and not spelled.endswith(")"))
        found[f"{spelled} {_as_text(value)}" if is_shown else spelled] = outcome
    for _, flags in GROUPS:
        for flag in flags:
            value = value_of(config, flag)
            is_given = flag.field in origins and value != default_of(flag)
            if not is_given or (flag.kind == SWITCH and value != flag.sets):
                continue
            outcome = outcome_of(flag, value, device)
            if outcome.verdict != WORKS:
                is_shown = flag.kind in (TEXT, INT, FLOAT)
                theirs = reading.translated.get(flag.name, "")
                said = theirs if dict(flag.translate).get(theirs) == value else value
                found[f"--{flag.name} {said}" if is_shown else f"--{flag.name}"] = outcome
    return found


def _accepted(spelled: str, outcome: Outcome) -> str:
    if outcome.why == DEFAULT:
        return f"{spelled} is accepted: {DEFAULT}"
    why = f"its feature is missing ({outcome.why})" if outcome.verdict == MISSING else outcome.why
    return f"{spelled} is accepted but has no effect: {why}"


def _refusal(refusals: Mapping[str, Outcome], variables: Sequence[str]) -> ConfigError:
    """One error for all that was asked for and is absent, so that no two starts find one each."""
    reasons = dict.fromkeys((flag.why, flag.use) for flag in refusals.values())
    parts = list(variables)
    for why, use in reasons:
        names = [
            spelled for spelled, flag in refusals.items() if (flag.why, flag.use) == (why, use)
        ]
        verb = "is" if len(names) == 1 else "are"
        parts.append(f"{', '.join(names)} {verb} not available in this build: {why} ({use})")
    return ConfigError("; ".join(parts))


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
