"""Every operation of the document with each of its fields wrong, one after the other: no answer is
a failure of the server, none is late, and who has the wrong key gets no further.

Where malformed.py throws dice, this goes through the list: whatever a route reads in its body, in
the query and in the path. The servers have what routes need that do nothing otherwise: a cache with
a store, an administrator's key, adapters, folders for files and dumps; the last, experts whose
choices are counted. What a route changes for all others is undone, so nothing is left out.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from banyan.server.http import auth
from banyan.server.openapi import SamplingParams
from banyan.server.routes import all_routes
from tests.models.families import tiny
from tests.support.lora import write_adapter
from tests.system.serving import Server, serving, status_of
from tests.trust.malformed import CORPUS, HOSTILE, LATE_S, Tally, spots, with_other

ADMIN = {"authorization": "Bearer root"}
USER = {"authorization": "Bearer user"}
WRONG = ({}, {"authorization": "Bearer usex"}, {"authorization": "Basic root"})
CONCURRENCY = 8
EDGES = (*(2**31 - 1, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, -(2**64)), 1e19)
TEXTS = (str(2**31), str(2**63), str(2**64), "-1", "1e400", "true", "\n", "a\udc80")
DEEP = ([2**64], {"5": 2**64}, [["a", 2**63]], {"\ud800": 1}, [True], [0.5])
VALUES = (*HOSTILE, *EDGES, *TEXTS, *DEEP)
RAW = (b"", b"{", b"[]", b"null", b'"x"', b"1", b"\xff\xfe", b"[" * 10_000, b'{"a": NaN}')
SEGMENTS = ("", "%00", "..", "%2e%2e%2fetc", "x" * 3000, str(2**64), "%ff%fe", "a%0d%0ab", "file-1")
OPERATOR = (auth.ADMIN, auth.OWN)
TF = (True, False)
STORE_OPTIONS = ("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token")
OPTIONS = "num_predict top_k top_p seed temperature num_ctx repeat_penalty stop keep_alive min_p"


def bases(model: Path, folder: Path, adapter: Path) -> dict[str, dict[str, object]]:
    """Route -> a body that is served, with every member that its fields have."""
    found = {path: dict(body) for path, body in reversed(CORPUS)}
    ids: dict[str, object] = {"input_ids": [5, 6, 7], "rid": "r"}
    sampled = dict.fromkeys(SamplingParams.__struct_fields__) | {"max_new_tokens": 2}
    options = dict.fromkeys(OPTIONS.split()) | {"num_predict": 2}
    store = {"path": str(folder / "pages")} | dict.fromkeys(STORE_OPTIONS, 64)
    found["/generate"] = ids | {"sampling_params": sampled}
    found["/v1/responses"] |= {"store": False, "reasoning": {"effort": "low"}}
    found["/api/generate"] |= {"options": options, "stream": False}
    found["/api/chat"] |= {"options": options}
    found["/vertex_generate"] = {"instances": [{"text": "a"}], "parameters": {"max_new_tokens": 2}}
    found["/v1/chat/completions"] |= {"logprobs": True, "bootstrap_room": None}
    found["/v1/batches"] |= {"completion_window": "24h"}
    found["/update_weight_version"] = {"new_version": "2"}
    found["/pin_prefix"] = {"input_ids": [5] * 40, "ttl_s": 5, "api_key": "user"}
    found["/hicache/storage-backend"] = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": json.dumps(store),
    }
    found["/update_weights_from_disk"] = {"model_path": str(model)}
    found["/load_lora_adapter"] = {"lora_name": "b", "lora_path": str(adapter)}
    found["/unload_lora_adapter"] = {"lora_name": "b"}
    found["/start_profile"] = {"output_dir": str(folder / "profiles")}
    found["/get_weights_by_name"] = {"name": "model.norm.weight", "truncate_size": 2}
    found["/v1/rerank"] = {"query": "q", "documents": ["a", "b"]}
    found["/close_session"] = {"session_id": "s"}
    for path, other in (
        ("/invocations", "/v1/chat/completions"),
        ("/v1/messages/count_tokens", "/v1/messages"),
        ("/v1/responses/input_tokens", "/v1/responses"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/detokenize", "/detokenize"),
        ("/api/embed", "/v1/embeddings"),
        ("/api/embeddings", "/v1/embeddings"),
        ("/v1/classify", "/v1/embeddings"),
        ("/classify", "/generate"),
        ("/encode", "/generate"),
    ):
        found[path] = {k: v for k, v in found[other].items() if k not in ("max_tokens", "stream")}
    return found


UNDO = {
    "/pause_generation": ("POST", "/continue_generation"),
    "/release_memory_occupation": ("POST", "/resume_memory_occupation"),
    "/start_profile": ("POST", "/stop_profile"),
    "/start_expert_distribution_record": ("POST", "/stop_expert_distribution_record"),
    "/pin_prefix": ("POST", "/unpin_prefix"),
    "/hicache/storage-backend": ("DELETE", "/hicache/storage-backend"),
    "/load_lora_adapter": ("POST", "/unload_lora_adapter"),
    "/unload_lora_adapter": ("POST", "/load_lora_adapter"),
}
"""What follows an answer of 200, with the body that is served."""
LAST = ("/update_weights_from_disk", "/unload_lora_adapter")
"""No store comes after other weights, and what goes must have come."""
UNSERVED = {
    *("/v1/classify", "/v1/rerank", "/v1/embeddings", "/api/embed", "/api/embeddings"),
    *("/classify", "/encode", "/v1/batches", "/unload_lora_adapter"),
}
"""The model has no vectors, the batch no file, and the adapter comes behind the first request. A
query holds texts, which some fields are not."""


@dataclass(frozen=True)
class Operation:
    """A method of a path."""

    method: str
    path: str
    """As a template."""
    fields: tuple[str, ...]
    guard: str
    takes_query: bool
    is_known: bool = False
    """Another one has the same handler and the same fields."""

    @property
    def headers(self) -> dict[str, str]:
        return ADMIN if self.guard == auth.ADMIN else USER


@dataclass(frozen=True)
class Try:
    """One request."""

    operation: Operation
    path: str
    body: bytes | None = None
    query: Mapping[str, str] | None = None
    what: str = ""
    """Which field has what."""

    @property
    def summary(self) -> str:
        sent = self.what or str(self.body if self.body is not None else self.query)
        return f"{self.operation.method} {self.path[:120]} {sent[:200]}"


def operations() -> list[Operation]:
    found: list[Operation] = []
    seen = set()
    for route in all_routes():
        fields = route.body.kind.__struct_fields__ if route.body else ()
        for path, methods in route.places().items():
            for method in methods:
                has_body = method in ("POST", "PUT") and (path == route.path)
                in_query = method in ("GET", "DELETE") or bool(route.body and route.body.is_query)
                own = tuple(fields) if has_body or in_query else ()
                is_known = (route.handler, has_body, in_query, bool(route.below)) in seen
                found.append(Operation(method, path, own, route.guard, in_query, is_known))
        seen |= {(route.handler, has, query, bool(route.below)) for has in TF for query in TF}
    return found


def text_of(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode()[:4000]


def tries(operation: Operation, base: dict[str, object], folder: Path) -> Iterator[Try]:
    """Every way in which it is asked, the first of them as it should be."""
    path = operation.path.replace("{", "").replace("}", "")
    if operation.method in ("POST", "PUT"):
        for value in (base, *VALUES):
            yield Try(operation, path, json.dumps(value).encode())
        for raw in RAW:
            yield Try(operation, path, raw)
        if operation.is_known:
            return
        places = {(name,) for name in operation.fields} | set(spots(base))
        for place in sorted(places, key=str):
            for value in VALUES:
                if place == ("output_dir",) and isinstance(value, str):
                    value = f"{folder}/{value}"  # it is made
                body = json.dumps(with_other(base, place, value)).encode()
                yield Try(operation, path, body, what=f"{place} {value!r}")
        for name in STORE_OPTIONS if operation.fields and "storage-backend" in path else ():
            key = "hicache_storage_backend_extra_config_json"
            for value in VALUES:
                options = json.loads(str(base[key])) | {name: value}
                yield Try(operation, path, json.dumps(base | {key: json.dumps(options)}).encode())
    if operation.takes_query:
        given = {k: text_of(v) for k, v in base.items()} if operation.fields else {}
        yield Try(operation, path, query=given)
        for name in (*operation.fields, "format", "dp_rank", "limit", "after", "force", "x"):
            for value in VALUES:
                if name != "output_dir":
                    yield Try(operation, path, query=given | {name: text_of(value)})
    if "{" in operation.path:
        head, _, rest = operation.path.partition("{")
        for segment in SEGMENTS:
            yield Try(operation, head + segment + rest.partition("}")[2])


class Door:
    """Asks one server, and keeps count."""

    def __init__(self, kinds: dict[str, dict[str, object]], folder: Path) -> None:
        self.tally = Tally()
        self.unserved: list[str] = []
        """Operations that do not do what they are asked for when all is well."""
        self._kinds, self._folder = kinds, folder

    async def all_of(self, server: Server, asked: list[Operation]) -> None:
        """Routes of the operator one by one and undone, the others beside each other."""
        async with httpx.AsyncClient(base_url=server.url, timeout=LATE_S) as client:
            for operation in asked:
                ways = tries(operation, self._kinds.get(operation.path, {}), self._folder)
                await self._first(client, operation, ways)
                several = CONCURRENCY if operation.guard not in OPERATOR else 1
                await asyncio.gather(*(self._each(client, ways) for _ in range(several)))

    async def _first(
        self, client: httpx.AsyncClient, operation: Operation, ways: Iterator[Try]
    ) -> None:
        for one in ways:
            status = await self._ask(client, one)
            if operation.path in self._kinds and one.query is None and status != 200:
                self.unserved.append(f"{one.summary}: {status}")
            await self._undo(client, operation)
            return

    async def _each(self, client: httpx.AsyncClient, ways: Iterator[Try]) -> None:
        for one in ways:
            if await self._ask(client, one) == 200:
                await self._undo(client, one.operation)

    async def _undo(self, client: httpx.AsyncClient, operation: Operation) -> None:
        if operation.path in UNDO and operation.method != "DELETE":
            method, path = UNDO[operation.path]
            body = json.dumps(self._kinds.get(path, {})).encode()
            other = Operation(method, path, (), auth.ADMIN, False)
            await self._ask(client, Try(other, path, body))

    async def _ask(self, client: httpx.AsyncClient, one: Try) -> int:
        began, summary = time.monotonic(), one.summary
        headers = {"content-type": "application/json", **one.operation.headers}
        pairs = "&".join(f"{key}={quote(value)}" for key, value in (one.query or {}).items())
        path = f"{one.path}?{pairs}" if pairs else one.path
        try:
            method = one.operation.method
            answer = await client.request(method, path, content=one.body, headers=headers)
            status = answer.status_code
            if status < 500 and "internal_error" in answer.text:  # in a stream that has begun
                status, summary = 500, f"{summary}: {answer.text[-300:]}"
        except httpx.HTTPError as error:
            status, summary = 0, f"{summary}: {error!r}"
        self.tally.saw(status, time.monotonic() - began, summary)
        return status


def locked(server: Server, asked: list[Operation]) -> list[str]:
    """Operations that did something for a key that is none."""
    found = []
    for operation in asked:
        for headers in WRONG if operation.guard != auth.OPEN else ():
            for content in (b"{}", b"{", None):
                answer = server.http.request(
                    operation.method, operation.path, content=content, headers=headers
                )
                if answer.status_code != 401:
                    found.append(f"{operation.method} {operation.path}: {answer.status_code}")
    return found


def documented(server: Server) -> set[tuple[str, str]]:
    paths = server.http.get("/openapi.json", headers=USER).json()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def none_fails(model: Path, folder: Path, asked: list[Operation], *flags: str) -> None:
    kinds = bases(model, folder, folder / "adapter")
    common = ("--threads", "1", "--max-total-tokens", "4096", "--log-level", "error")
    keys = ("--api-key", "user", "--admin-api-key", "root")
    flags = ("--model-path", str(model), *common, *keys, *flags)
    with serving(folder / "server.log", *flags) as server:
        missed = documented(server) - {(one.method, one.path) for one in operations()}
        opened = locked(server, asked)
        engine, door = server.engine_pid(), Door(kinds, folder)
        asyncio.run(door.all_of(server, asked))
        assert server.engine_pid() == engine, "the engine was lost"
        assert status_of(server, "/health") == 200
    tally = door.tally
    print(
        f"\nfigure: {len(asked)} operations, each field of each: {sum(tally.statuses.values()):,} "
        f"requests ({tally.summary}): {len(tally.faults)} failures of the server, the longest "
        f"answer after {tally.longest_s:.1f} s; {len(opened)} answers without a valid key"
    )
    assert not missed, missed
    assert not opened, opened[:5]
    assert not tally.faults, tally.faults[:20]
    wrong = [summary for summary in door.unserved if summary.split()[1] not in UNSERVED]
    assert not wrong, wrong


@pytest.mark.parametrize("is_operator", [True, False], ids=["operator", "callers"])
def test_no_field_of_any_operation_is_a_failure_of_the_server(tiny_model, tmp_path, is_operator):
    adapter = write_adapter(tmp_path / "adapter", 1)
    (tmp_path / "profiles").mkdir()
    flags = ("--file-storage-path", str(tmp_path / "kept"), "--enable-hierarchical-cache")
    flags += ("--enable-lora", "--lora-paths", f"a={adapter}", "--max-lora-rank", "8")
    flags += ("--crash-dump-folder", str(tmp_path / "dumps"), "--enable-metrics")
    asked = [one for one in operations() if (one.guard in OPERATOR) == is_operator]
    asked.sort(key=lambda one: (one.path in LAST, one.path))
    none_fails(tiny_model, tmp_path, asked, *flags)


def test_nothing_fails_where_choices_of_experts_are_counted(tmp_path, monkeypatch):
    (tmp_path / "dumps").mkdir()
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path / "dumps"))
    model = tmp_path / "model"
    tiny("qwen2 moe, some dense", model)
    asked = [one for one in operations() if "expert" in one.path or one.path == "/generate"]
    flags = ("--skip-tokenizer-init", "--expert-distribution-recorder-mode", "stat")
    none_fails(model, tmp_path, asked, *flags)
