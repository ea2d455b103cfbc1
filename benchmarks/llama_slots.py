"""llama.cpp's server as a keeper of prefixes, for `python -m benchmarks.tiers`: its prompt cache in
memory, or its slots saved to files and restored, which is what its users have in place of a store.
"""

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from urllib.error import HTTPError, URLError

READY_S = 120.0


class LlamaSlots:
    """
    Args:
        url: of a running server.
        slots: how many it has (-np).
        keeps_files: save a conversation's slot after each turn, and restore it before the next; the
            server needs --slot-save-path.
    """

    def __init__(self, url: str, slots: int, keeps_files: bool) -> None:
        self._url = url.rstrip("/")
        self._keeps_files = keeps_files
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)

    def turn(self, number: int, prompt: list[int], output_len: int) -> tuple[float, int, list[int]]:
        """(seconds to the first token, tokens of the prompt that were kept, output) of a turn of
        conversation `number`. Restoring is before the first token, saving behind the last."""
        if not self._keeps_files:
            return self._complete(prompt, output_len, -1, time.perf_counter())
        slot = self._free.get()
        try:
            began = time.perf_counter()
            file = {"filename": f"conversation-{number}.bin"}
            try:
                self._post(f"/slots/{slot}?action=restore", file)
            except HTTPError as error:
                if error.code != 400:  # it has no file of it yet
                    raise SystemExit(
                        f"slots cannot be restored: {error} (--slot-save-path)"
                    ) from None
                self._post(f"/slots/{slot}?action=erase", {})
            found = self._complete(prompt, output_len, slot, began)
            self._post(f"/slots/{slot}?action=save", file)
            return found
        finally:
            self._free.put(slot)

    def _complete(
        self, prompt: list[int], output_len: int, slot: int, began: float
    ) -> tuple[float, int, list[int]]:
        body = {
            "prompt": prompt,
            "n_predict": output_len,
            "id_slot": slot,
            "cache_prompt": True,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
            "stream": True,
        }
        first_s, cached, output = 0.0, 0, list[int]()
        with self._open("/completion", body) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if event.get("tokens") and not event.get("stop"):
                    first_s = first_s or time.perf_counter() - began
                    output += event["tokens"]
                cached = event.get("timings", {}).get("cache_n", cached)
        return first_s, cached, output

    def _post(self, path: str, body: object) -> None:
        with self._open(path, body) as answer:
            answer.read()

    def _open(self, path: str, body: object):
        request = urllib.request.Request(
            f"{self._url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=600)


@contextmanager
def saved_slots() -> Iterator[Path]:
    """A folder for the files of slots, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="llama-slots-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def llama_server(
    program: str, gguf: str, slots: int, tokens: int, threads: int, folder: Path | None
) -> Iterator[str]:
    """The URL of a server that is started here, with room for `tokens` in all its slots.

    folder: files of slots; None = its prompt cache in memory, of the size that it has by default.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [program, "-m", gguf, "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    words += ["-t", str(threads), "-tb", str(threads), "-np", str(slots), "-c", str(tokens)]
    words += ["--cache-ram", "0", "--slot-save-path", f"{folder}/"] if folder else []
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(words, stdout=quiet, stderr=quiet)
    try:
        deadline = time.monotonic() + READY_S
        while not _is_ready(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{program} does not start")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False
