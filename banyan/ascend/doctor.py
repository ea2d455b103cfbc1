"""`banyan doctor --device npu`: a machine with Ascend NPUs, fact by fact."""

from banyan.ascend.launch.box import Box, this_box
from banyan.ascend.launch.facts import SOCS
from banyan.ascend.launch.health import examine, verdict
from banyan.ascend.launch.machine import find_soc
from banyan.base.errors import ConfigError
from banyan.config.env import read_environment


def npu_doctor(soc: str, box: Box | None = None) -> bool:
    """Print the table of a machine, this one by default; returns whether anything is an error."""
    name = soc or find_soc(box.root if box else "/")
    if name not in SOCS and name:
        raise ConfigError(f"no chip is called {name}", hint=f"give --soc {' or '.join(SOCS)}")
    box = box or this_box(read_environment().launch)
    chip = SOCS[name or "A3"]
    print(f"\n{'Ascend NPU':<24} {name or 'none is seen; taken for an A3'}")
    checks = examine(box, chip)
    for check in checks:
        wanted = f" (wanted: {check.wanted})" if check.wanted else ""
        print(f"{check.name:<24} {check.value}{wanted}")
        if check.finding is not None:
            print(f"{'':<24} {check.finding.severity}: {check.finding.use}")
    print(f"{'verdict':<24} {verdict(checks, box)}")
    return any(check.finding is not None and check.finding.is_error for check in checks)
