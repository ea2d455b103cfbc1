"""The configuration as users name it: flag by flag, for people and for tools. Secrets stay out."""

from banyan.config.cli import value_of
from banyan.config.flags.flag import SWITCH, Flag
from banyan.config.flags.table import GROUPS
from banyan.config.schema import Config

_SECRET = ("api-key", "admin-api-key", "ssl-keyfile-password")


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
