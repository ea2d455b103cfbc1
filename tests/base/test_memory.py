"""Memory of a process: pages that the start no longer needs, and slow garbage collections."""

import gc
import logging
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from banyan.base.clock import VirtualClock
from banyan.base.errors import ConfigError
from banyan.base.memory import SlowGc, _as_on_disk, report_slow_gc, set_gc_threshold, unmap_files
from tests.support.flags import config_of

UNDER_A_LIMIT = """
import resource
from banyan.chat_template.processes import TemplateProcesses
resource.setrlimit(resource.RLIMIT_AS, (%d, %d))
processes = TemplateProcesses("{%% for m in messages %%}{{ m }}{%% endfor %%}")
print(processes.render({"messages": ["a", "b"]}))
from banyan.base.memory import bound_address_space
bound_address_space(1 << 60)
print(resource.getrlimit(resource.RLIMIT_AS))
"""
SMAPS = Path("/proc/self/smaps")
LIBRARY = "libtorch_cpu.so"


needs_smaps = pytest.mark.skipif(
    not SMAPS.exists(), reason="the system does not tell what is mapped"
)


def resident(file: str, access: str) -> int:
    """KiB of the file that this process has in use with this access."""
    found = re.findall(rf" {access} .*{file}\n(?:.*\n)*?Rss: +(\d+)", SMAPS.read_text())
    return sum(map(int, found))


@needs_smaps
def test_code_that_was_run_is_let_go_and_runs_again():
    assert torch.arange(5).sum() == 10
    before = resident(LIBRARY, "r-xp")
    unmap_files()
    assert resident(LIBRARY, "r-xp") < before / 2
    assert torch.arange(5).sum() == 10


@needs_smaps
def test_constants_that_were_read_are_let_go_and_read_again(tmp_path):
    content = bytes(range(256)) * 4096
    path = tmp_path / "constants"
    path.write_bytes(content)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    assert mapped[:] == content and resident(path.name, "r--p") == len(content) >> 10
    unmap_files()
    assert resident(path.name, "r--p") == 0
    assert mapped[:] == content


def test_only_what_is_as_its_file_has_it_is_let_go():
    smaps = """\
1000-2000 r-xp 00000000 fe:00 1    /lib/a b.so
Rss:        4 kB
Anonymous:  0 kB
2000-3000 rw-p 00000000 fe:00 1    /lib/a b.so
Anonymous:  0 kB
3000-5000 r-xp 00000000 fe:00 2    /lib/changed.so
Anonymous:  4 kB
7000-8000 r--p 00000000 fe:00 2    /lib/changed.so
Anonymous:  0 kB
8000-9000 r--p 00000000 fe:00 2    /lib/changed.so
Anonymous:  4 kB
9000-a000 r--s 00000000 fe:00 3    /models/shared.gguf
Anonymous:  0 kB
5000-6000 r-xp 00000000 00:00 0    [vdso]
Anonymous:  0 kB
6000-7000 r-xp 00000000 00:00 0
Anonymous:  0 kB
"""
    assert list(_as_on_disk(smaps)) == [(0x1000, 0x2000), (0x7000, 0x8000)]


@pytest.fixture
def lines(caplog, monkeypatch):
    log = logging.getLogger("banyan.base.memory")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    before = list(gc.callbacks)
    yield lambda: caplog.messages
    gc.callbacks[:] = before


def test_a_collection_that_takes_long_is_reported(lines):
    report_slow_gc(config_of("--gc-warning-threshold-secs", "1e-9").observe.slow_gc_s)
    gc.collect()
    assert any(
        line.startswith("garbage collection took seconds=") and " generation=2 " in line
        for line in lines()
    )


def test_a_quick_collection_is_not(lines):
    clock = VirtualClock()
    watch = SlowGc(0.5, clock)
    for seconds in (0.1, 0.5, 0.6):
        watch("start", {})
        clock.advance_to(clock.now() + seconds)
        watch("stop", {"generation": 1, "collected": 7})
    assert lines() == ["garbage collection took seconds=0.600 generation=1 freed=7"]


def test_nothing_is_watched_unless_asked_for():
    before = list(gc.callbacks)
    report_slow_gc(config_of().observe.slow_gc_s)
    assert gc.callbacks == before


def test_thresholds_of_the_collector_are_set():
    before = gc.get_threshold()
    try:
        set_gc_threshold(config_of().observe.gc_threshold)
        assert gc.get_threshold() == before
        set_gc_threshold(config_of("--gc-threshold", "701", "11", "12").observe.gc_threshold)
        assert gc.get_threshold() == (701, 11, 12)
        with pytest.raises(ConfigError, match="one to three numbers, got 4"):
            set_gc_threshold((1, 2, 3, 4))
    finally:
        gc.set_threshold(*before)


def test_processes_with_a_bound_start_under_a_lower_limit_of_the_system() -> None:
    limit = 768 << 20
    code = UNDER_A_LIMIT % (limit, limit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"ab\n({limit}, {limit})\n", done.stderr
