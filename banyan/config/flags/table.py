"""The one index of every flag: which spellings exist, and what each stands for."""

import difflib
import sys
from dataclasses import dataclass
from functools import cache

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.flags import cache as cache_flags
from banyan.config.flags import device, model, observe, schedule, server
from banyan.config.flags.flag import SWITCH, Flag
from banyan.config.flags.foreign import FOREIGN_ALIASES, FOREIGN_SWITCHES, FOREIGN_VALUES
from banyan.config.flags.foreign_later import LATER_ALIASES, LATER_SWITCHES, LATER_VALUES
from banyan.config.flags.harmless import HARMLESS, LISTS, SUCCESSORS

GROUPS = (
    ("Model", model.FLAGS),
    ("Server", server.FLAGS),
    ("Scheduler", schedule.FLAGS),
    ("KV cache", cache_flags.FLAGS),
    ("Machine", device.FLAGS),
    ("Logs", observe.FLAGS),
)

CONFIG_FILE = "config"
"""The flag that names a file of flags; it owns no field."""


@dataclass(frozen=True)
class Foreign:
    """A flag of others that has no effect here.

    Attributes:
        neutral: values that ask for nothing and are accepted.
        reason: why any value is accepted; "" when the flag is refused.
    """

    name: str
    is_switch: bool
    neutral: tuple[str, ...]
    reason: str
    documented: bool

    def refusal(self, spelled: str) -> ConfigError:
        successor = SUCCESSORS.get(self.name)
        renamed = f" (now --{successor})" if successor else ""
        hint = f"leave it out, or set it to {' or '.join(self.neutral)}" if self.neutral else ""
        return ConfigError(
            f"{spelled}{renamed} is not available in this build", hint=hint or "leave it out"
        )


@cache
def spellings() -> dict[str, Flag | Foreign]:
    """Every exact spelling, aliases and old names included."""
    index: dict[str, Flag | Foreign] = {}
    for aliases, switches, values, documented in (
        (LATER_ALIASES, LATER_SWITCHES, LATER_VALUES, False),
        (FOREIGN_ALIASES, FOREIGN_SWITCHES, FOREIGN_VALUES, True),
    ):
        for name in switches:
            index[name] = Foreign(name, True, (), HARMLESS.get(name, ""), documented)
        for name, neutral in values.items():
            index[name] = Foreign(name, False, neutral, HARMLESS.get(name, ""), documented)
        for alias, name in aliases.items():
            index[alias] = index[name]
    for _, flags in GROUPS:
        for flag in flags:
            for name in (flag.name, *flag.aliases, *flag.old):
                assert not isinstance(index.get(name), Flag), f"--{name} stands in two tables"
                index[name] = flag
    return index


def find(name: str, *, abbreviate: bool) -> Flag | Foreign:
    """The flag spelled `name` (no dashes in front); ConfigError suggests the nearest one.

    With `abbreviate` a beginning that only one documented flag has will do.
    """
    index = spellings()
    if name in index:
        return index[name]
    matches: dict[str, Flag | Foreign] = {}
    if abbreviate and name:
        starting = (known for spelled, known in index.items() if spelled.startswith(name))
        matches = {known.name: known for known in starting if known.documented}
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        names = ", ".join(f"--{n}" for n in sorted(matches))
        raise ConfigError(f"--{name} is ambiguous: {names}", hint="write the long name")
    near = difflib.get_close_matches(name, [*index, CONFIG_FILE], n=1, cutoff=0.6)
    hint = f"did you mean --{near[0]}?" if near else "see --help"
    raise ConfigError(f"unknown flag --{printable(name, 60)}", hint=hint)


def most_words(known: Flag | Foreign) -> int:
    """How many words may follow the flag on a command line."""
    if isinstance(known, Flag):
        return 0 if known.kind == SWITCH else 1
    if known.name in LISTS:
        return sys.maxsize
    return 0 if known.is_switch else 1
