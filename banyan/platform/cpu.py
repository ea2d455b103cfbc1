"""The CPU: cores and memory within the container's limits, features from /proc/cpuinfo.

Limits of control groups v1 and v2 count, on every level above this process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from banyan.base.os import num_cores
from banyan.config.defaults import Defaults
from banyan.model_config.model_config import ModelConfig
from banyan.platform.base import ANY_SIZE, Host, Memory, Traits

if TYPE_CHECKING:
    import torch

_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16")
_MORE_FEATURES = ("avx_vnni", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "sve")


class CpuPlatform(Host):
    """
    Args:
        root: folder that holds /proc and /sys.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._groups = list(_control_groups(root))
        self.traits = Traits(
            name="cpu",
            torch_device="cpu",
            collectives=("shared", "gloo"),
            dtypes=("float32", "bfloat16"),
            page_sizes=(16, 32, 64, 128),
            async_launch=False,
            features=_features(root),
            cores=self._cores(),
            programs=ANY_SIZE,
            shares_steps=True,
        )

    def open(self, local_rank: int, threads: int) -> torch.device:
        import torch

        torch.set_num_threads(threads or self.traits.cores)
        return torch.device("cpu")

    def memory(self) -> Memory:
        host = _fields(self._root / "proc/meminfo")
        total, free = host.get("MemTotal", 0) * 1024, host.get("MemAvailable", 0) * 1024
        for group in self._groups:
            limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
            used = _number(group / "memory.current", group / "memory.usage_in_bytes")
            if limit is None or used is None or limit >= total:
                continue
            # Clean file pages count as used but are given back on demand.
            cached = _fields(group / "memory.stat").get("inactive_file", 0)
            total = limit
            free = min(free, limit - used + cached)
        return Memory(total, max(0, free), self._ours())

    def defaults(self, model_config: ModelConfig) -> Defaults:
        return Defaults(
            device=self.traits.name,
            dtypes=self.traits.dtypes,
            page_size=self.traits.page_sizes[0],
            chunk_tokens=512,
            running_cap=128,  # more would only make every step longer
            free_share=0.25,  # other programs run on the machine
            is_sized=True,
            multi_step=8,
        )

    def _ours(self) -> int:
        pages = _text(self._root / "proc/self/statm").split()
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0

    def _cores(self) -> int:
        cores = num_cores()
        for group in self._groups:
            quota, period = _cpu_quota(group)
            if quota > 0 and period > 0:
                cores = min(cores, max(1, math.ceil(quota / period)))
        return cores


def _features(root: Path) -> frozenset[str]:
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split()) & frozenset(_FEATURES + _MORE_FEATURES)
    return frozenset()


def _control_groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups of this process, its own first, then the groups above."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        tops = [base / name for name in controllers.split(",")] if controllers else [base]
        for top in tops:
            inner = top / path.lstrip("/")
            yield from (inner, *(up for up in inner.parents if up == top or top in up.parents))


def _cpu_quota(group: Path) -> tuple[int, int]:
    """Microseconds of CPU time per period; (0, 0) = no limit."""
    words = _text(group / "cpu.max").split()
    if len(words) == 2 and words[0].isdecimal():
        return int(words[0]), int(words[1])
    quota = _number(group / "cpu.cfs_quota_us")
    return (quota or 0, _number(group / "cpu.cfs_period_us") or 0) if quota else (0, 0)


def _fields(path: Path) -> dict[str, int]:
    """Lines of "name: number unit" or "name number"."""
    found: dict[str, int] = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def _number(*paths: Path) -> int | None:
    """The number in the first file that has one; "max" is no number."""
    for path in paths:
        text = _text(path).strip()
        if text.removeprefix("-").isdecimal():
            return int(text)
    return None


def _text(path: Path) -> str:
    """Text of a small system file; "" = the kernel has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
