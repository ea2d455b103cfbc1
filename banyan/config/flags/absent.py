"""Flags of SGLang that have no effect here: `absent.tsv`, with the reasons of `reasons.tsv`.

A row says how the flag is written, which values ask for nothing, and its outcome:

- idle: nothing is left to do for it; accepted with a line
- belongs: it tunes a feature that is absent, and that something else has to ask for; the same
- refused: it asks for what is absent; answers, capacity or security would differ without it

Columns with several words have blanks between them. `values` are the legal ones, `LOW..HIGH` for
numbers, and `other=ours` where another spelling is read as ours. Flags that only later releases of
SGLang have are not documented, and never abbreviated.
"""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from banyan.config.flags.flag import SWITCH, Absent, Replaced

_HERE = Path(__file__).parent


def read_absent() -> Iterator[Absent]:
    """Every flag of the table, in its order."""
    reasons = {row["reason"]: row for row in _rows("reasons.tsv")}
    for row in _rows("absent.tsv"):
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


def _rows(name: str) -> Iterator[dict[str, str]]:
    with open(_HERE / name, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


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
