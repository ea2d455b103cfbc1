"""`banyan npu-selfcheck`: each operator on the NPU of this machine, compared with plain torch."""

from collections.abc import Iterator, Sequence

import torch

from banyan.ascend.driver import open_driver
from banyan.ascend.ops.operators import Operators
from banyan.ascend.selfcheck.cases import Case, attention_cases, product_cases, try_out
from banyan.base.errors import ConfigError

USAGE = """banyan npu-selfcheck

Runs each operator that Banyan uses on an Ascend NPU on the first device, checks its contract before
the call, and compares the result with plain torch on the host. For the first look at a machine: a
minute, no model, no server. With BANYAN_NPU=tests.ascend.emulation, in the folder of the source, it
runs on the emulated device. Exit code 1: a result is off, or a call failed.
"""


def npu_selfcheck(argv: Sequence[str]) -> int:
    """Print one line per case; returns the exit code."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    if argv:
        raise ConfigError(f"banyan npu-selfcheck takes no {argv[0]}", hint="leave it out")
    npu = open_driver().npu
    device = torch.device("npu", 0)
    print(f"{npu.get_device_name(0)}, torch {torch.__version__}")
    operators, failed, count = Operators(is_checked=True), 0, 0
    for case in cases():
        outcome = try_out(case, operators, lambda tensor: tensor.to(device))
        verdict = f"FAILS   {outcome.why}" if outcome.why else f"ok      off by {outcome.worst:.1e}"
        print(f"{case.operator:<34} {case.name:<48} {verdict}")
        failed += bool(outcome.why)
        count += 1
    print(f"verdict: {count - failed} of {count} cases are as on the host")
    return int(failed > 0)


def cases() -> Iterator[Case]:
    """One call or more of each operator; inputs are the same every time."""
    yield from attention_cases()
    yield from product_cases()
