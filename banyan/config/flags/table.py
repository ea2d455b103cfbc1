"""The index of all flags: every spelling, and the flag that it means."""

import difflib
from functools import cache

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.flags import cache as cache_flags
from banyan.config.flags import (
    device,
    disaggregation,
    experts,
    grammar,
    lora,
    model,
    observe,
    schedule,
    server,
    speculative,
)
from banyan.config.flags.absent import REPLACED, read_absent
from banyan.config.flags.flag import Absent, Flag, Replaced

GROUPS = (
    ("Model", model.FLAGS),
    ("Server", server.FLAGS),
    ("Scheduler", schedule.FLAGS),
    ("KV cache", cache_flags.FLAGS),
    ("Structured output", grammar.FLAGS),
    ("Speculative decoding", speculative.FLAGS),
    ("Prefill/decode disaggregation", disaggregation.FLAGS),
    ("LoRA", lora.FLAGS),
    ("Experts", experts.FLAGS),
    ("Device and parallelism", device.FLAGS),
    ("Logs, metrics and traces", observe.FLAGS),
)

CONFIG_FILE = "config"
"""The flag of a configuration file; it owns no field."""
CONFIG_FILE_PROOF = (
    "tests/config/test_file.py::test_a_file_in_the_form_of_the_documents_is_understood"
)

Known = Flag | Absent | Replaced


@cache
def known_flags() -> tuple[Known, ...]:
    """Every flag once: working ones, then unsupported ones, then old names."""
    working = [flag for _, flags in GROUPS for flag in flags]
    return (*working, *read_absent(), *REPLACED)


@cache
def spellings() -> dict[str, Known]:
    """Every exact spelling with aliases and old names; working flags win over unsupported ones."""
    index: dict[str, Known] = {}
    for flag in known_flags():
        for name in flag.names:
            index.setdefault(name, flag)
    return index


def find(name: str, *, abbreviate: bool) -> Known:
    """Return the flag spelled `name` (without dashes); ConfigError suggests the nearest one.

    With `abbreviate` a unique prefix of a documented flag is accepted.
    """
    index = spellings()
    if name in index:
        return index[name]
    matches: dict[str, Known] = {}
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
