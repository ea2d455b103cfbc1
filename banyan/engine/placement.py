"""Placement of ranks: the device of each rank, and its cores (of a NUMA node, or a share of all).

`place_rank` must run before the rank opens its device, because threads inherit the cores of the
thread that starts them.
"""

import os
from pathlib import Path

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.base.os import available_cores
from banyan.config.schema import DeviceConfig, ParallelConfig

log = logger(__name__)


def device_number(device: DeviceConfig, parallel: ParallelConfig, place: int) -> int:
    """The device number of a rank: devices are assigned in order of replicas, then ranks.

    Args:
        place: index of the rank among the ranks of its replica on this machine.
    """
    mine = parallel.local_replica * parallel.local_world + place
    return device.first_number + mine * device.number_step


def is_placed(device: DeviceConfig) -> bool:
    """Whether each rank is restricted to its own cores."""
    return bool(device.numa_nodes) or device.pins_cores


def place_rank(
    device: DeviceConfig, parallel: ParallelConfig, place: int, root: Path = Path("/")
) -> None:
    """Restrict the calling thread, and threads that it starts, to the cores of one rank.

    Args:
        place: index of the rank among the ranks of its replica on this machine.
        root: folder that contains sys/; for tests.

    Raises:
        ConfigError: the NUMA node does not exist, or has too few usable cores for its ranks.
    """
    if not is_placed(device):
        return
    here = parallel.local_world
    mine = parallel.local_replica * here + place
    nodes = _nodes(device.numa_nodes, parallel.local_replicas * here)
    sharers = [place for place, node in enumerate(nodes) if node == nodes[mine]]
    cores = _cores_of(nodes[mine], root)
    if len(cores) < len(sharers):
        where = "this machine" if nodes[mine] is None else f"node {nodes[mine]}"
        raise ConfigError(
            f"{len(cores)} cores of {where} cannot be shared by {len(sharers)} ranks",
            hint="lower --tp or --dp, or name more nodes with --numa-node",
        )
    at, count = sharers.index(mine), len(sharers)
    own = cores[len(cores) * at // count : len(cores) * (at + 1) // count]
    os.sched_setaffinity(0, own)
    log.info("rank=%d runs on cores %s", mine, ",".join(map(str, own)))


def _nodes(given: tuple[int, ...], ranks: int) -> list[int | None]:
    """The NUMA node of each rank; None for any."""
    if len(given) not in (0, 1, ranks):
        raise ConfigError(
            f"--numa-node names {len(given)} nodes for {ranks} ranks",
            hint="name one node for all of them, or one for each",
        )
    return list(given) if len(given) == ranks else [given[0] if given else None] * ranks


def _cores_of(node: int | None, root: Path) -> list[int]:
    """Cores of the NUMA node that this process may use, in order."""
    available = available_cores()
    if node is None:
        return available
    folder = root / "sys/devices/system/node"
    known = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*"))
    if node not in known:
        raise ConfigError(
            f"--numa-node {node} does not exist on this machine",
            hint=f"its nodes: {', '.join(map(str, known)) or 'none'}",
        )
    cores: set[int] = set()
    for part in (folder / f"node{node}" / "cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return sorted(cores.intersection(available))
