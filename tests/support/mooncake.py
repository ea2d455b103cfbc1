"""Stores of others for tests: a mooncake master and who lends it memory, in processes of their own.
`make test-transfer` installs the packages."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from banyan.kv_transfer.mooncake_store import _check_master
from tests.support.page_transfer import free_port

_LENDER = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
places = "127.0.0.1", "P2PHANDSHAKE"
status = store.setup(*places, int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("lends", status, flush=True)
sys.stdin.read()
os._exit(0)
"""


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed; make test-transfer brings it")


class Master:
    """A mooncake_master, and a process that lends `lent_bytes` to it."""

    def __init__(self, lent_bytes: int) -> None:
        needs("mooncake")
        import mooncake

        self.address = f"127.0.0.1:{free_port()}"
        program = Path(mooncake.__file__).parent / "mooncake_master"
        port = self.address.rpartition(":")[2]
        flags = (f"--rpc_port={port}", f"--metrics_port={free_port()}", "--logtostderr")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.master = subprocess.Popen([str(program), *flags], **quiet)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < deadline, "mooncake_master does not answer"
            time.sleep(0.05)
        self.lender = subprocess.Popen(
            [sys.executable, "-c", _LENDER, self.address, str(lent_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GLOG_minloglevel": "3"},
        )
        assert self.lender.stdout is not None
        for line in self.lender.stdout:
            if line.startswith(b"lends"):
                assert line.split() == [b"lends", b"0"], line
                return
        raise AssertionError("nobody lends mooncake memory")

    def close(self) -> None:
        for process in (self.lender, self.master):
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        try:
            _check_master(self.address)
        except Exception:
            return False
        return True


@contextmanager
def mooncake(lent_bytes: int = 128 << 20) -> Iterator[Master]:
    master = Master(lent_bytes)
    try:
        yield master
    finally:
        master.close()
