"""What a store beyond the process saves after a restart, and what it costs when nothing is reused.

    python -m benchmarks.store [--model demo] [--input-len 4096] [--repeats 3]

Starts servers one after another, with and without a store, on a folder that is removed at the end.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

READY_S = 120.0
SETTLE_S = 60.0
AT_ONCE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--input-len", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", type=int, default=6, help="pairs of turns without reuse")
    parser.add_argument("--output-len", type=int, default=32, help="of the turns without reuse")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="banyan-pages-"))
    extra = json.dumps({"path": str(folder), "max_bytes": 8 << 30})
    stored = [
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", extra),
    ]
    try:
        if args.repeats:
            compare_restarts(args, stored, folder)
        compare_cold(args, stored, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare_restarts(args: argparse.Namespace, stored: list[str], folder: Path) -> None:
    """One prompt, computed once, to servers that have just been started."""
    prompt = tokens(args.input_len, 7)
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


def compare_cold(args: argparse.Namespace, stored: list[str], folder: Path) -> None:
    """Prompts that nobody has sent, some at once, by turns to a server without a store and to one
    with it. Each turn ends when all that it computed is stored."""
    with serving(args.model, []) as plain, serving(args.model, stored) as keeping:
        ports = {"without a store": plain, "with a store": keeping}
        seconds: dict[str, list[float]] = {name: [] for name in ports}
        cpu: dict[str, list[float]] = {name: [] for name in ports}
        for number in range(args.cold):
            order = list(ports.items())
            for name, port in order if number % 2 else reversed(order):
                held, before = pages(folder), cpu_of(port)
                seed = 1000 + number * AT_ONCE
                prompts = [tokens(args.input_len, seed + each) for each in range(AT_ONCE)]
                seconds[name].append(ask_all(port, prompts, args.output_len))
                if port == keeping:
                    wait_for_pages(folder, held + AT_ONCE * (args.input_len // 16))
                cpu[name].append(cpu_of(port) - before)
        made = AT_ONCE * (args.input_len + args.output_len)
        for name in ports:
            rate = made / statistics.median(seconds[name])
            print(
                f"{AT_ONCE} prompts that nobody has sent, {name}: {spread(seconds[name])}, "
                f"{rate:.0f} tokens/s, {statistics.median(cpu[name]):.3f} CPU seconds"
            )
        for what, of in (("time", seconds), ("CPU time", cpu)):
            pairs = zip(of["with a store"], of["without a store"], strict=True)
            costs = [100 * (with_ / without - 1) for with_, without in pairs]
            shown = " ".join(f"{cost:+.1f}" for cost in sorted(costs))
            print(f"a store costs {statistics.median(costs):+.1f} % of the {what} ({shown})")


def ask_all(port: int, prompts: list[list[int]], output_len: int) -> float:
    """Seconds until all of them are answered, sent at once."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: ask(port, prompt, output_len), prompts))
    return time.perf_counter() - began


def cpu_of(port: int) -> float:
    """CPU seconds of the server at `port` and of all that it has started."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            stats[int(path.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = {pid for pid in stats if f"--port\0{port}\0" in command_of(pid)}
    while more := {pid for pid, (parent, _) in stats.items() if parent in mine} - mine:
        mine |= more
    return sum(stats[pid][1] for pid in mine) / os.sysconf("SC_CLK_TCK")


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def tokens(count: int, seed: int) -> list[int]:
    """Token ids that differ from prompt to prompt from the first page on."""
    found, state = [], seed
    for _ in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        found.append(100 + state // 65536 % 20000)
    return found


def ask(port: int, prompt: list[int], output_len: int = 1) -> tuple[float, int]:
    """(seconds of one request, cached tokens)."""
    params = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params}
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
    """Bytes; pages share files."""
    found = [page.stat() for page in folder.rglob("*.page")]
    return sum({each.st_ino: each.st_size for each in found}.values())


def wait_for_pages(folder: Path, count: int) -> None:
    deadline = time.monotonic() + SETTLE_S
    while pages(folder) < count and time.monotonic() < deadline:
        time.sleep(0.1)


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} … {max(seconds):.3f})"


if __name__ == "__main__":
    main()
