"""The table of docs/ascend.md that says how each operator is known to be right.

python -m tests.ascend.emulation.real.table    # prints it
"""

from collections import Counter
from collections.abc import Iterator

from banyan.ascend.selfcheck import cases
from tests.ascend.emulation.exchange_cases import exchange_cases
from tests.ascend.emulation.operators import SCHEMAS
from tests.ascend.emulation.real.lists import schemas, versions, without_meta

START = "<!-- printed by python -m tests.ascend.emulation.real.table -->"
END = "<!-- end -->"
HARDWARE = (
    "speed of any kind, and values tuned for it (memory fractions, buffer sizes in practice)",
    "which release of CANN has which kernel",
    "the bits of real kernels: sums in fp16, fractal formats, int8 saturation, ties of top-k",
    "asynchrony, memory that the host writes again too early, limits of streams, memory of graphs",
    "HCCL, RDMA, HCCS and SDMA between devices and machines; MemFabric's data path",
    "bring-up of several machines; A5",
)
"""What no emulation tells."""


def table() -> str:
    return "\n".join([START, *_lines(), END]) + "\n"


def _lines() -> Iterator[str]:
    yield "| operator | verified on emulator | checked against the real schema | needs hardware |"
    yield "|---|---|---|---|"
    counts = Counter(case.operator for case in (*cases(), *exchange_cases()))
    of_ranks = {case.operator for case in exchange_cases()}
    for operator, count in sorted(counts.items()):
        emulated = f"{count} cases" if operator in SCHEMAS else "no"
        known = [v for v in versions() if f"npu::{operator}" in schemas(v)]
        checked = ", ".join(known)
        both = [v for v in known if f"npu::{operator}" not in without_meta(v)]
        checked += f"; meta kernels of {', '.join(both)}" if both else ""
        needs = "two devices" if operator in of_ranks else "`banyan npu-selfcheck`"
        yield f"| `{operator}` | {emulated} | {checked or 'no'} | {needs} |"
    for each in HARDWARE:
        yield f"| {each} | no | no | yes |"


if __name__ == "__main__":
    print(table(), end="")
