"""What a store beyond the process saves after a restart, and what it costs when nothing is reused.

    python -m benchmarks.store [--model demo] [--input-len 4096] [--repeats 3]

Starts servers one after another, with and without a store, on a folder that is removed at the end.
"""

import argparse
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

READY_S = 120.0
SETTLE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--input-len", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", type=int, default=6, help="prompts of the run without reuse")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="banyan-pages-"))
    extra = json.dumps({"path": str(folder), "max_bytes": 8 << 30})
    stored = [
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", extra),
    ]
    prompt = tokens(args.input_len, 7)
    try:
        with serving(args.model, stored) as port:
            ask(port, prompt)
            wait_for_pages(folder, args.input_len // 16)
        print(f"{pages(folder)} pages, {size_of(folder) / 1e6:.1f} MB")
        for name, flags in (("without a store", []), ("with the store", stored)):
            found = []
            for _ in range(args.repeats):
                with serving(args.model, flags) as port:
                    found.append(ask(port, prompt))
            cached = found[0][1]
            seconds = [each[0] for each in found]
            print(f"first token after a restart, {name}: {spread(seconds)} ({cached} cached)")
        for turn in range(2):  # either order, since machines warm up and cool down
            order = [("without a store", []), ("with a store", stored)]
            for name, flags in order if turn else reversed(order):
                with serving(args.model, flags) as port:
                    seconds = [
                        ask(port, tokens(args.input_len, 1000 + turn * 100 + n))[0]
                        for n in range(args.cold)
                    ]
                    print(f"first token of prompts that nobody has sent, {name}: {spread(seconds)}")
                if flags:
                    shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tokens(count: int, seed: int) -> list[int]:
    """Token ids that differ from prompt to prompt from the first page on."""
    found, state = [], seed
    for _ in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        found.append(100 + state // 65536 % 20000)
    return found


def ask(port: int, prompt: list[int]) -> tuple[float, int]:
    """(seconds of one request for one token, cached tokens)."""
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    began = time.perf_counter()
    meta = call(port, "/generate", body)["meta_info"]
    return time.perf_counter() - began, meta["cached_tokens"]


def call(port: int, path: str, body: object) -> dict:
    data = json.dumps(body).encode()
    request = Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        return json.load(answer)


@contextmanager
def serving(model: str, flags: list[str]) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "banyan.launch_server", "--model-path", model]
    command += ["--port", str(port), "--log-level", "warning", *flags]
    server = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + READY_S
        while not is_ready(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server does not start")
            time.sleep(0.1)
        ask(port, tokens(64, 3))
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


def pages(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.page"))


def size_of(folder: Path) -> int:
    return sum(page.stat().st_size for page in folder.rglob("*.page"))


def wait_for_pages(folder: Path, count: int) -> None:
    deadline = time.monotonic() + SETTLE_S
    while pages(folder) < count and time.monotonic() < deadline:
        time.sleep(0.1)


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} … {max(seconds):.3f})"


if __name__ == "__main__":
    main()
