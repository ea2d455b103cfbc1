"""Servers whose pages go to a store of others: `make test-transfer` installs the packages. All are
processes, because their clients keep threads.
"""

import json
import signal
from pathlib import Path

from tests.support.mooncake import mooncake, needs
from tests.support.stores import KEPT, OTHER, WAIT_S, http_ask, output_of, stored_tokens
from tests.system.serving import Server, wait_until
from tests.system.test_attached_store import KEY, ROUTE, attach, present, started


def fill(server: Server, extra: dict[str, object], kind: str) -> dict:
    """Attach, compute, and detach once all of it is stored."""
    reply = attach(server, "", extra=extra, hicache_storage_backend=kind)
    assert reply.status_code == 200, reply.text
    found = http_ask(server)
    assert server.http.delete(ROUTE, headers=KEY).status_code == 200
    return found


def test_nixl_answers_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    needs("nixl_cu12")
    extra: dict[str, object] = {"path": str(tmp_path / "pages"), "prefetch_threshold": 64}
    with started(tiny_model, tmp_path / "1.log") as server:
        right = fill(server, extra, "nixl")
    flags = ("--hicache-storage-backend", "nixl", "--hicache-storage-prefetch-policy")
    text = json.dumps(extra)
    more = ("wait_complete", "--hicache-storage-backend-extra-config", text)
    with started(tiny_model, tmp_path / "2.log", *flags, *more) as server:
        found = http_ask(server)
        assert output_of(found) == output_of(right) and stored_tokens(found) == KEPT
        server.signal(signal.SIGTERM)
        assert server.exit_code(60) == 0


def test_mooncake_answers_after_a_restart_and_its_end_costs_no_answer(
    tiny_model: Path, tmp_path: Path
) -> None:
    with mooncake() as master:
        extra: dict[str, object] = {
            "master_server_address": master.address,
            "global_segment_size": 0,
            "prefetch_threshold": 64,
        }
        with started(tiny_model, tmp_path / "1.log") as server:
            right, other = fill(server, extra, "mooncake"), http_ask(server, OTHER)
            server.signal(signal.SIGTERM)
            assert server.exit_code(60) == 0
        with started(tiny_model, tmp_path / "2.log") as server:
            reply = attach(server, "", extra=extra, hicache_storage_backend="mooncake")
            assert reply.status_code == 200 and present(server) == ("mooncake", "mooncake")
            found = http_ask(server)
            assert output_of(found) == output_of(right) and stored_tokens(found) == KEPT
            master.close()
            assert output_of(http_ask(server, OTHER)) == output_of(other)
            assert output_of(http_ask(server)) == output_of(right)
            words = lambda: server.log.read_text().count("cannot be looked up")  # noqa: E731
            wait_until(lambda: bool(words()), WAIT_S, "a word about the store")
            http_ask(server, OTHER[::-1])
            assert words() == 1
            refused = attach(server, "", extra=extra, hicache_storage_backend="mooncake")
            assert "attached already" in refused.text
            force = server.http.delete(ROUTE, headers=KEY, params={"force": "true"})
            assert force.status_code == 200, force.text
            refused = attach(server, "", extra=extra, hicache_storage_backend="mooncake")
            assert refused.status_code == 400 and "no master answers" in refused.text
            assert output_of(http_ask(server)) == output_of(right)
            server.signal(signal.SIGTERM)
            assert server.exit_code(60) == 0
