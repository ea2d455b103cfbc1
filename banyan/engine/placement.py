"""Where the ranks run: which device each has, and which cores: those of a memory node, or a share
of all cores.

Called before a rank opens its device: threads that start later stay where their maker is.
"""

import os
from pathlib import Path

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.base.os import available_cores
from banyan.config.schema import DeviceConfig, ParallelConfig

log = logger(__name__)


def device_number(device: DeviceConfig, parallel: ParallelConfig, place: int) -> int:
    """The device of a rank: replicas have theirs one after another, ranks of a machine too.

    Args:
        place: of the rank among those of its replica on this machine.
    """
    mine = parallel.local_replica * parallel.local_world + place
    return device.first_number + mine * device.number_step


def is_placed(device: DeviceConfig) -> bool:
    """Whether each rank keeps to cores that no other rank has."""
    return bool(device.numa_nodes) or device.pins_cores


def place_rank(
    device: DeviceConfig, parallel: ParallelConfig, place: int, root: Path = Path("/")
) -> None:
    """Keep the calling thread, and those that it starts, to the cores of one rank.

    Args:
        place: of the rank among those of its replica on this machine.
        root: where /sys is found; a test gives its own.

    Raises:
        ConfigError: a node that does not exist, has none of our cores, or too few for its ranks.
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
    """The node of each rank; None for any."""
    if len(given) not in (0, 1, ranks):
        raise ConfigError(
            f"--numa-node names {len(given)} nodes for {ranks} ranks",
            hint="name one node for all of them, or one for each",
        )
    return list(given) if len(given) == ranks else [given[0] if given else None] * ranks


def _cores_of(node: int | None, root: Path) -> list[int]:
    """The node's cores that this process may use, in order."""
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
