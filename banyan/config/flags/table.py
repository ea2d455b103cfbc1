"""The index of all flags: every spelling, and the flag that it means.

Flags of SGLang without an effect here are rows of `absent.tsv`, with the reasons of `reasons.tsv`.
A row says how the flag is written, which values ask for nothing, and its outcome:

- idle: nothing is left to do for it; accepted with a line
- belongs: it tunes a feature that is absent, and that something else has to ask for; the same
- refused: it asks for what is absent; answers, capacity or security would differ without it

Columns with several words have blanks between them. `values` are the legal ones, `LOW..HIGH` for
numbers, and `other=ours` where another spelling is read as ours. Flags that only later releases of
SGLang have are not documented, and never abbreviated.
"""

import csv
import difflib
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.flags import cache as cache_flags
from banyan.config.flags import (
    device,
    experts,
    media,
    model,
    observe,
    schedule,
    server,
    speculative,
)
from banyan.config.flags.flag import SWITCH, Absent, Flag, Replaced

GROUPS = (
    ("Model", model.FLAGS),
    ("Server", server.FLAGS),
    ("Pictures", media.FLAGS),
    ("Scheduler", schedule.FLAGS),
    ("KV cache", cache_flags.FLAGS),
    ("Structured output", server.GRAMMAR_FLAGS),
    ("Speculative decoding", speculative.FLAGS),
    ("Prefill/decode disaggregation", cache_flags.DISAGGREGATION_FLAGS),
    ("LoRA", model.LORA_FLAGS),
    ("Experts", experts.FLAGS),
    ("Device and parallelism", device.FLAGS),
    ("Logs, metrics and traces", observe.FLAGS),
)

CONFIG_FILE = "config"
"""The flag of a configuration file; it owns no field."""
CONFIG_FILE_PROOF = (
    "tests/config/test_file.py::test_a_file_in_the_form_of_the_documents_is_understood"
)

REPLACED = (
    *(
        Replaced(f"enable-{name}-moe", kind=SWITCH, successor="moe-runner-backend", value=value)
        for name, value in (
            ("flashinfer-cutedsl", "flashinfer_cutedsl"),
            ("flashinfer-cutlass", "flashinfer_cutlass"),
            ("flashinfer-mxfp4", "flashinfer_mxfp4"),
            ("flashinfer-trtllm", "flashinfer_trtllm"),
            ("triton-kernel", "triton_kernel"),
        )
    ),
    Replaced("enable-deepep-moe", kind=SWITCH, successor="moe-a2a-backend", value="deepep"),
    Replaced(
        "keep-mm-feature-on-device",
        kind=SWITCH,
        successor="mm-feature-transport",
        value="cuda_ipc",
    ),
)
"""Former switches, and the flag and value that say the same."""

_HERE = Path(__file__).parent
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


def read_absent() -> Iterator[Absent]:
    """Every flag of the table, in its order."""
    reasons = {row["reason"]: row for row in read_rows("reasons.tsv")}
    for row in read_rows("absent.tsv"):
        reason = reasons[row["reason"]]
        values = row["values"].split()
        low, high = -math.inf, math.inf
        if values and ".." in values[0]:
            first, _, last = values.pop().partition("..")
            low, high = float(first), float(last or math.inf)
        pairs = [tuple(value.split("=")) for value in values if "=" in value]
        flag = Absent(
            row["flag"],
            kind=row["kind"],
            aliases=tuple(row["aliases"].split()),
            choices=tuple(value for value in values if "=" not in value),
            translate=tuple((other, ours) for other, ours in pairs),
            low=low,
            high=high,
            documented=row["documented"] == "yes",
            outcome=row["outcome"],
            why=reason["why"],
            use=reason["use"],
            neutral=tuple(row["default"].split()),
        )
        yield flag


def read_rows(name: str) -> Iterator[dict[str, str]]:
    with open(_HERE / name, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
