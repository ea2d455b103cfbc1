"""Lists the files of the package with a call during one warm streamed chat, for each process.

python -m benchmarks.files_per_chat [--functions] [--json FILE] [-- FLAGS OF banyan serve]

The demo model answers; two chats warm the server before the third one is recorded. Every process
has a profile function from its start. It counts calls while a shared byte says so.
"""

import argparse
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from urllib.request import Request, urlopen

from banyan.server.lifecycle.startup import READY_LINE

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "banyan") + os.sep
FOLDER = "BANYAN_CALLS"
WAITING, RECORDING, WRITING = 0, 1, 2
NO_CALLS = ("<module>", "<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


def install() -> None:
    """Count the calls of this process while the shared byte is RECORDING."""
    folder = Path(os.environ[FOLDER])
    with (folder / "state").open("r+b") as file:
        state = mmap.mmap(file.fileno(), 1)
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or state[0] == WAITING:
            return
        if state[0] == RECORDING:
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE):
                calls[code.co_filename.removeprefix(PACKAGE), code.co_qualname] += 1
        elif calls:
            rows = [[file, name, number] for (file, name), number in calls.items()]
            calls.clear()
            command = Path("/proc/self/cmdline").read_bytes().decode().replace("\0", " ")
            report = {"command": command, "calls": rows}
            (folder / f"{os.getpid()}.json").write_text(json.dumps(report))

    threading.setprofile(count)
    sys.setprofile(count)


def chat(url: str) -> str:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Write a story about a tree."}],
        "stream": True,
        "max_tokens": 12,
    }
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def record(folder: Path, flags: list[str]) -> list[dict[str, object]]:
    """Start a server, warm it, record one chat and return the report of every process."""
    state = folder / "state"
    state.write_bytes(bytes([WAITING]))
    module = "import benchmarks.files_per_chat as calls\ncalls.install()\n"
    (folder / "sitecustomize.py").write_text(module)
    paths = f"{folder}{os.pathsep}{ROOT}"
    environment = {**os.environ, FOLDER: str(folder), "PYTHONPATH": paths}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "banyan", "serve", "--port", port, *flags]
    server = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        while READY_LINE not in (line := server.stdout.readline()):
            assert line, "the server ended before it was ready"
        threading.Thread(target=server.stdout.read, daemon=True).start()
        for _ in range(2):
            chat(url)
        time.sleep(1.0)
        with state.open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 1)
        shared[0] = RECORDING
        events = chat(url)
        shared[0] = WRITING
        assert "data: [DONE]" in events, events
        chat(url)
        time.sleep(1.0)
    finally:
        server.terminate()
        server.wait(30)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", action="store_true", help="name the functions of each file")
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    parser.add_argument("flags", nargs="*", help="flags of `banyan serve`, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reports = record(Path(folder), options.flags)
    if options.json:
        options.json.write_text(json.dumps(reports))
    for report in reports:
        files: dict[str, Counter[str]] = {}
        for file, name, number in report["calls"]:  # type: ignore[attr-defined]
            if not name.endswith(NO_CALLS):
                files.setdefault(file, Counter())[name] += number
        print(f"\n{len(files)} files with a call: {str(report['command'])[:100]}")
        for file, names in sorted(files.items()):
            print(f"{names.total():7} {file}")
            if options.functions:
                for name, number in names.most_common():
                    print(f"          {number:5} {name}")


if __name__ == "__main__":
    main()
