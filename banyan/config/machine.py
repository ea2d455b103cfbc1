"""What this process may use of the machine: cores and memory, limits of its container included."""

import os
import sys


def usable_cores() -> int:
    """Cores this process may run on: its affinity, and a container's quota rounded up."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, int(-(-quota // 1))) if quota else cores)


def cpu_quota(path: str = "/sys/fs/cgroup/cpu.max") -> float:
    """Cores a control group allows, 0.0 when it sets no limit."""
    words = _first_line(path).split()
    if len(words) != 2 or words[0] == "max":
        return 0.0
    return int(words[0]) / int(words[1])


def memory_limit(path: str = "/sys/fs/cgroup/memory.max") -> int:
    """Bytes a control group allows, 0 when it sets no limit."""
    text = _first_line(path)
    return int(text) if text.isdigit() else 0


def _first_line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""  # no control groups here: no limit
