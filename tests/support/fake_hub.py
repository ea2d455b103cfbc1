"""A hub of our own: one repository over HTTP on the loopback address, with faults on demand."""

import contextlib
import hashlib
import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from banyan.config.env import Environment

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "owner/name"


def git_sha1(body: bytes) -> str:
    """The hash of git's object, which the hub has as the ETag of small files."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


@dataclass
class Fault:
    """What goes wrong with one request for bytes.

    Attributes:
        status: answered in the place of the file.
        headers: sent with that status.
        keeps: bytes that are sent before the connection breaks; -1 = all.
        stalls: says nothing more after those bytes, instead of breaking.
        whole: sends the whole file, whatever range was asked for.
        damages: changes the first byte that is sent.
        shifts: bytes that the answer is said to begin later than it was asked to.
        more: bytes that are sent behind the end of the file.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    keeps: int = -1
    stalls: bool = False
    whole: bool = False
    damages: bool = False
    shifts: int = 0
    more: int = 0


class FakeHub(ThreadingHTTPServer):
    """
    Attributes:
        large: names of the files that are kept in LFS: with a hash, and their bytes at `/bytes/`.
        faults: what goes wrong with the next requests for bytes, one each.
        refusal: (status, headers) of every answer about the repository; None = as it should be.
        file_refusal: the same for its files only, as a gated one has it.
        stated: hashes in the place of the true ones.
        elsewhere: another host that large files are said to lie on.
        facts: members in the place of the true ones in the answer about the repository.
        item: the same in that answer's entry of each file.
        headers: the same in the headers of each file.
        body: sent in the place of the answer about the repository.
        endless: paths of which begin answers that never end.
        asked: (method, path, range) of every request so far.
        tokens: (path, authorization) of every request so far.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], large: tuple[str, ...], repo: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.large, self.repo = files, large, repo
        self.faults: deque[Fault] = deque()
        self.refusal: tuple[int, dict[str, str]] | None = None
        self.file_refusal: tuple[int, dict[str, str]] | None = None
        self.stated: dict[str, str] = {}
        self.elsewhere = ""
        self.states_no_hash = False
        self.facts: dict[str, object] = {}
        self.item: dict[str, object] = {}
        self.headers: dict[str, str] = {}
        self.body = b""
        self.endless: tuple[str, ...] = ()
        self.asked: list[tuple[str, str, str]] = []
        self.tokens: list[tuple[str, str]] = []
        self.endless_bytes = 0
        self.ended = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are part of the tests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sha256(self, name: str) -> str:
        return self.stated.get(name) or hashlib.sha256(self.files[name]).hexdigest()

    def ranges(self) -> list[str]:
        """The ranges that were asked of large files, in order."""
        return [r for method, path, r in self.asked if method == "GET" and "/bytes/" in path]

    def variables(self, cache: object) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HUB_CACHE": str(cache)}

    def environment(self, cache: object, token: str = "") -> Environment:
        return Environment(hf_endpoint=self.url, hf_cache=str(cache), hf_token=token)


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def _answer(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        hub.asked.append((self.command, path, self.headers.get("range", "")))
        hub.tokens.append((path, self.headers.get("authorization", "")))
        if self.command == "GET" and path.startswith(hub.endless or ("//",)):
            return self._never_end()
        if path.startswith("/bytes/"):
            return self._bytes(path.removeprefix("/bytes/"))
        if hub.refusal:
            return self._send(hub.refusal[0], b"{}", hub.refusal[1])
        repo = hub.repo
        if path.startswith(f"/api/models/{repo}"):
            files = [self._sibling(name) for name in hub.files]
            if hub.body:
                return self._send(200, hub.body, {"Content-Type": "application/json"})
            return self._json({"id": repo, "sha": COMMIT, "siblings": files} | hub.facts)
        name = path.removeprefix(f"/{repo}/resolve/").partition("/")[2]
        if not path.startswith(f"/{repo}/resolve/"):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if name not in hub.files:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        if hub.file_refusal:
            return self._send(hub.file_refusal[0], b"{}", hub.file_refusal[1])
        self._resolve(name)

    def _resolve(self, name: str) -> None:
        hub, body = self.server, self.server.files[name]
        if name not in hub.large:
            return self._send(200, body, self._facts(name))
        address = {"Location": f"{hub.elsewhere}/bytes/{name}"}
        self._send(302, b"", self._facts(name) | address)

    def _facts(self, name: str) -> dict[str, str]:
        hub, body = self.server, self.server.files[name]
        etag = hashlib.sha1(body).hexdigest() if hub.states_no_hash else git_sha1(body)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
        if name in hub.large:
            headers["X-Linked-Size"] = str(len(body))
            if not hub.states_no_hash:
                headers["X-Linked-ETag"] = f'"{hub.sha256(name)}"'
        return headers | hub.headers

    def _bytes(self, name: str) -> None:
        hub, body = self.server, self.server.files[name]
        fault = hub.faults.popleft() if hub.faults and self.command == "GET" else Fault()
        if fault.status:
            return self._send(fault.status, b"", fault.headers)
        asked = "" if fault.whole else self.headers.get("range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-") or 0)
        sent = body[start:] + bytes(fault.more)
        if fault.damages:
            sent = bytes([sent[0] ^ 1]) + sent[1:]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(sent)))
        for header, text in self._facts(name).items():
            self.send_header(header, text)
        if asked:
            said = f"bytes {start + fault.shifts}-{len(body) - 1}/{len(body)}"
            self.send_header("Content-Range", said)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(sent if fault.keeps < 0 else sent[: fault.keeps])
        if fault.keeps >= 0:
            self.wfile.flush()
            self.close_connection = True
            if fault.stalls:
                hub.ended.wait(60)

    def _sibling(self, name: str) -> dict[str, object]:
        body = self.server.files[name]
        found: dict[str, object] = {"rfilename": name, "size": len(body), "blobId": git_sha1(body)}
        if name in self.server.large and not self.server.states_no_hash:
            lfs = {"sha256": self.server.sha256(name), "size": len(body), "pointerSize": 135}
            found["lfs"] = lfs
        return found | self.server.item

    def _never_end(self) -> None:
        self.send_response(200)
        for name, text in self._facts(next(iter(self.server.files))).items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while not self.server.ended.is_set():
                self.wfile.write(b'"' + b"x" * 65535)
                self.server.endless_bytes += 65536

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def fake_hub(
    files: dict[str, bytes], large: tuple[str, ...] = (), repo: str = REPO
) -> Iterator[FakeHub]:
    """A hub that holds `files` as one repository; those of `large` are kept in LFS."""
    with FakeHub(files, large, repo) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.ended.set()
            hub.shutdown()
            thread.join()
