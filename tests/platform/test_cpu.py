"""The CPU's facts, from system files that a test writes itself."""

import os

import pytest
import torch

from banyan.platform import PLATFORMS
from banyan.platform.cpu import CpuPlatform

GIB = 1 << 30


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def host(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\n",
            "proc/cpuinfo": "processor : 0\nflags\t\t: fpu sse avx2 avx512_vnni nonsense\n",
            "proc/self/statm": "1000 256 30 0 0 0 0\n",
            "proc/self/cgroup": "0::/pod/box\n",
        },
    )
    return tmp_path


def test_without_limits_memory_is_that_of_the_host(host):
    memory = CpuPlatform(host).memory()

    assert (memory.total_bytes, memory.free_bytes) == (64 * GIB, 40 * GIB)
    assert memory.ours_bytes == 256 * os.sysconf("SC_PAGE_SIZE")


def test_the_container_limit_counts_and_clean_file_pages_are_free(host):
    write(
        host,
        {
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{6 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )

    memory = CpuPlatform(host).memory()

    assert (memory.total_bytes, memory.free_bytes) == (8 * GIB, 3 * GIB)


def test_version_1_control_groups_are_read_too(host):
    write(
        host,
        {
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
        },
    )

    platform = CpuPlatform(host)

    assert platform.memory().free_bytes == 3 * GIB
    assert platform.traits.cores == 1


def test_a_processor_quota_limits_the_cores(host):
    write(host, {"sys/fs/cgroup/pod/box/cpu.max": "50000 100000\n"})

    assert CpuPlatform(host).traits.cores == 1


def test_features_are_those_that_kernels_ask_for(host):
    assert CpuPlatform(host).traits.features == {"avx2", "avx512_vnni"}


def test_opening_sets_the_threads_of_torch():
    before = torch.get_num_threads()
    try:
        device = CpuPlatform().open(local_rank=0, threads=3)

        assert device == torch.device("cpu")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["cpu", "null"])
def test_every_platform_of_the_table_answers(name):
    platform = PLATFORMS.load(name)()

    assert platform.traits.name == name
    assert platform.memory().free_bytes > 0
    assert str(platform.open(0, torch.get_num_threads())) == platform.traits.torch_device
