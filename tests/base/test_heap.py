"""Memory that a start leaves behind goes back to the system, and nothing that is needed with it."""

import re
from pathlib import Path

import pytest
import torch

from banyan.base.heap import _code, unmap_code

SMAPS = Path("/proc/self/smaps")
LIBRARY = "libtorch_cpu.so"


def resident_code() -> int:
    """KiB of the library's code that this process has mapped."""
    found = re.findall(rf" r-xp .*{LIBRARY}\n(?:.*\n)*?Rss: +(\d+)", SMAPS.read_text())
    return sum(map(int, found))


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not tell what is mapped")
def test_code_that_was_run_is_let_go_and_runs_again():
    assert torch.arange(5).sum() == 10
    before = resident_code()
    unmap_code()
    assert resident_code() < before / 2
    assert torch.arange(5).sum() == 10


def test_only_code_that_is_as_its_file_has_it_is_let_go():
    smaps = """\
1000-2000 r-xp 00000000 fe:00 1    /lib/a b.so
Rss:        4 kB
Anonymous:  0 kB
2000-3000 rw-p 00000000 fe:00 1    /lib/a b.so
Anonymous:  0 kB
3000-5000 r-xp 00000000 fe:00 2    /lib/changed.so
Anonymous:  4 kB
5000-6000 r-xp 00000000 00:00 0    [vdso]
Anonymous:  0 kB
6000-7000 r-xp 00000000 00:00 0
Anonymous:  0 kB
"""
    assert list(_code(smaps)) == [(0x1000, 0x2000)]
