"""What a container of one node gets: devices of its chip, the driver's folders, shared memory."""

import shlex
from collections.abc import Sequence

from banyan.ascend.launch.facts import Soc

IMAGE = "banyan-npu"
SHARED_MEMORY_GB = 16
MANAGEMENT = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
DRIVER = (
    "/usr/local/sbin",
    "/usr/local/Ascend/driver",
    "/usr/local/Ascend/firmware",
    "/etc/ascend_install.info",
    "/var/queue_schedule",
)
"""Of the host, at the same place inside."""
RESOURCE = "huawei.com/Ascend910"
"""What the vendor's device plugin calls one device in Kubernetes."""


def devices(soc: Soc) -> tuple[str, ...]:
    """Every device file of one machine with this chip."""
    return (*(f"/dev/davinci{number}" for number in range(soc.devices)), *MANAGEMENT)


def mounts(model: str) -> tuple[str, ...]:
    """HOST:INSIDE of the driver's folders and of the weights, none of which is written to."""
    return tuple(f"{path}:{path}:ro" for path in (*DRIVER, model))


def docker_run(soc: Soc, model: str, name: str, command: Sequence[str]) -> str:
    """What starts one container by hand, beside its file of variables."""
    lines = [
        f"docker run --rm --name {name} --privileged --network host --ipc host",
        f"--shm-size {SHARED_MEMORY_GB}g --ulimit memlock=-1 --env-file {name}.env",
        *(f"--device {path}" for path in devices(soc)),
        *(f"--volume {shlex.quote(mount)}" for mount in mounts(model)),
        IMAGE,
        *command,
    ]
    return " \\\n  ".join(lines)
