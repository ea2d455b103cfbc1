"""Real routers in processes of their own, before the servers of `tests/system/serving.py`."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.system.serving import ROOT, Server, free_port, wait_ready


def launch_router(log: Path, *flags: str, module: str = "launch_router", port: int = 0) -> Server:
    """Start a router and return at once."""
    port = port or free_port()
    command = [sys.executable, "-m", f"banyan.{module}", "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Server(process, port, log)


@contextlib.contextmanager
def routing(log: Path, *flags: str, module: str = "launch_router") -> Iterator[Server]:
    """A router that is ready; killed whole at the end; shows the end of its log on failure."""
    router = launch_router(log, *flags, module=module)
    try:
        wait_ready(router)
        yield router
    except BaseException:
        print(f"--- {log.name}\n{router.tail()}", file=sys.stderr)
        raise
    finally:
        router.kill()
