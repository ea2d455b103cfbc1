"""A store that is attached and detached by the admin routes while a server runs."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.stores import KEPT, OTHER, WAIT_S, http_ask, output_of, pages, stored_tokens
from tests.system.serving import Server, serving, wait_until

ROUTE = "/hicache/storage-backend"
KEY = {"Authorization": "Bearer root"}


@contextmanager
def started(model: Path, log: Path, *flags: str) -> Iterator[Server]:
    common = ("--threads", "1", "--max-total-tokens", "4096", "--admin-api-key", "root")
    with serving(
        log, "--model-path", str(model), *common, "--enable-hierarchical-cache", *flags
    ) as server:
        yield server


def attach(server: Server, folder: Path | str, **fields: object) -> httpx.Response:
    extra = fields.pop("extra", {"path": str(folder), "prefetch_threshold": 64})
    text = extra if isinstance(extra, str) else json.dumps(extra)
    body = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": text,
        "hicache_storage_prefetch_policy": "wait_complete",
        **fields,
    }
    return server.http.put(ROUTE, json=body, headers=KEY)


def detach(server: Server) -> httpx.Response:
    return server.http.delete(ROUTE, headers=KEY)


def present(server: Server) -> tuple[object, object]:
    """The store that the route and /server_info tell of."""
    facts = server.http.get("/server_info").json()
    return server.http.get(ROUTE, headers=KEY).json()["hicache_storage_backend"], facts[
        "hicache_storage_backend"
    ]


LAYOUTS = {"one rank": (), "two ranks": ("--tp-size", "2")}
if os.environ.get("PARALLEL"):
    LAYOUTS["two stages"] = ("--pp-size", "2")


@pytest.mark.parametrize("ranks", LAYOUTS.values(), ids=LAYOUTS)
def test_a_store_comes_and_goes_while_the_server_runs(
    tiny_model: Path, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    folder = tmp_path / "pages"
    with started(tiny_model, tmp_path / "1.log", *ranks) as server:
        assert not present(server)[0]
        before = http_ask(server)
        assert "cached_tokens_details" not in before["meta_info"]
        reply = attach(server, folder)
        assert reply.status_code == 200 and "attached" in reply.text, reply.text
        assert present(server) == ("file", "file")
        # What the device held before goes to the store as well, and stays.
        wait_until(lambda: len(pages(folder)) >= KEPT // 16, WAIT_S, "pages from before")
        held = http_ask(server)
        assert held["meta_info"]["cached_tokens"] >= KEPT and stored_tokens(held) == 0
        other = http_ask(server, OTHER)
        assert detach(server).status_code == 200, "what was on its way is waited for"
        assert len(pages(folder)) >= 2 * KEPT // 16
        assert not present(server)[0] and detach(server).status_code == 200
        assert http_ask(server)["meta_info"]["cached_tokens"] >= KEPT
        server.signal(signal.SIGTERM)
        assert server.exit_code(60) == 0
    with started(tiny_model, tmp_path / "2.log", *ranks) as server:
        assert attach(server, folder).status_code == 200
        first, second = http_ask(server), http_ask(server, OTHER)
        assert (stored_tokens(first), stored_tokens(second)) == (KEPT, KEPT)
        assert (output_of(first), output_of(second)) == (output_of(before), output_of(other))
        count = len(pages(folder))
        assert detach(server).status_code == 200
        assert output_of(http_ask(server, OTHER[::-1])) and len(pages(folder)) == count
        elsewhere = tmp_path / "elsewhere"
        assert attach(server, elsewhere).status_code == 200
        wait_until(lambda: len(pages(elsewhere)) >= 3 * KEPT // 16, WAIT_S, "pages in the new one")


@pytest.mark.skipif(not os.environ.get("PARALLEL"), reason="make test-parallel")
def test_replicas_attach_one_store_together(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    with started(tiny_model, tmp_path / "log", "--dp-size", "2") as server:
        refused = attach(server, folder, extra={"pth": "x"})
        assert refused.status_code == 400 and not present(server)[0]
        assert attach(server, folder).status_code == 200
        first = http_ask(server)
        wait_until(lambda: len(pages(folder)) >= KEPT // 16, WAIT_S, "the pages to be stored")
        found = [http_ask(server) for _ in range(3)]
        assert [output_of(each) for each in found] == [output_of(first)] * 3
        assert any(stored_tokens(each) == KEPT for each in found), "the other replica reads them"
        assert detach(server).status_code == 200 and not present(server)[0]


def test_what_cannot_be_attached_is_one_error_and_changes_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder, file = tmp_path / "pages", tmp_path / "file"
    file.write_text("")
    with started(tiny_model, tmp_path / "log") as server:
        for reply, said in (
            (attach(server, file / "x"), "cannot use"),
            (attach(server, folder, extra="[1]"), "must be a JSON object"),
            (attach(server, folder, extra='{"path": "/a", "path": "/b"}'), "appears twice"),
            (attach(server, folder, extra={"pth": "x"}), "has no 'pth'"),
            (attach(server, folder, extra={"prefetch_threshold": -1}), "prefetch_threshold"),
            (attach(server, folder, hicache_write_policy="never"), "hicache_write_policy must"),
            (attach(server, folder, hicache_storage_backend="cloud"), "unknown cache store"),
        ):
            assert reply.status_code == 400 and said in reply.text, reply.text
        assert server.http.put(ROUTE, json={}).status_code == 401
        assert not present(server)[0]
        assert attach(server, folder).status_code == 200
        again = attach(server, tmp_path / "two")
        assert again.status_code == 400 and "attached already" in again.text
        assert not (tmp_path / "two").exists() and present(server) == ("file", "file")
        body = {
            "input_ids": OTHER[:50],
            "sampling_params": {"max_new_tokens": 1900},
            "stream": True,
        }
        body["sampling_params"]["ignore_eos"] = True
        with httpx.stream("POST", server.url + "/generate", json=body, timeout=WAIT_S) as answer:
            lines = answer.iter_lines()
            assert next(lines)  # it runs, and goes on running
            server.http.post("/pause_generation", json={"mode": "in_place"}, headers=KEY)
            refused = detach(server)
            assert refused.status_code == 400 and "1 running and 0 waiting" in refused.text
            assert present(server) == ("file", "file")
            server.http.post("/continue_generation", headers=KEY)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert detach(server).status_code == 200


def test_a_server_without_an_admin_key_or_the_flag_attaches_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "4096")
    with serving(tmp_path / "1.log", *flags, "--enable-hierarchical-cache") as server:
        reply = attach(server, tmp_path / "pages")
        assert reply.status_code == 400 and "--admin-api-key" in reply.text
    with serving(tmp_path / "2.log", *flags, "--admin-api-key", "root") as server:
        reply = attach(server, tmp_path / "pages")
        assert reply.status_code == 400 and "--enable-hierarchical-cache" in reply.text
    assert not (tmp_path / "pages").exists()


def test_the_engine_after_a_killed_one_has_the_attached_store_or_says_that_it_has_none(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "pages", tmp_path / "log"
    with started(tiny_model, log) as server:
        assert attach(server, folder).status_code == 200
        first = http_ask(server)
        wait_until(lambda: len(pages(folder)) >= KEPT // 16, WAIT_S, "the pages to be stored")
        _replace_engine(server)
        again = http_ask(server)
        assert stored_tokens(again) == KEPT and output_of(again) == output_of(first)
        assert (
            present(server) == ("file", "file") and "without a cache store" not in log.read_text()
        )
        # One whose folder cannot be used any more serves without it.
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("no folder")
        _replace_engine(server)
        assert output_of(http_ask(server)) == output_of(first)
        assert "the new engine continues without a cache store" in log.read_text()
        # Whoever lets go of it brings it back, in another place.
        assert detach(server).status_code == 200 and not present(server)[0]
        assert attach(server, tmp_path / "elsewhere").status_code == 200
        server.http.post("/flush_cache", headers=KEY)
        assert stored_tokens(http_ask(server)) == KEPT


def _replace_engine(server: Server) -> None:
    """Kill the engine, and wait for the one that comes in its place."""
    lost = server.engine_pid()
    os.kill(lost, signal.SIGKILL)
    wait_until(
        lambda: (
            server.engine_pids() not in ([], [lost])
            and server.http.get("/readyz").status_code == 200
        ),
        WAIT_S,
        "another engine",
    )
