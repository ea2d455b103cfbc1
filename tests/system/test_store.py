"""The cache outlives its process: servers that find what others have computed, in files."""

import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banyan.kv_transfer.file_store import FileStore, Segment
from banyan.llm import Engine
from banyan.scheduler.hicache_fetch import StoreFetcher
from banyan.sim.replay import check
from tests.support.stores import (
    KEPT,
    OTHER,
    PROMPT,
    WAIT_S,
    http_ask,
    output_of,
    pages,
    stored_tokens,
)
from tests.system.checkpoint import write_tiny_model
from tests.system.serving import serving, wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


FLAGS = {"engine_mode": "inprocess", "threads": 1, "max_total_tokens": 4096}

OpenEngine = Callable[..., Engine]


@pytest.fixture
def start(tiny_model: Path, folder: Path) -> Iterator[OpenEngine]:
    """Engines on one store; by default a request waits as long as it takes."""
    opened: list[Engine] = []

    def open_(**flags: object) -> Engine:
        extra = {"path": str(folder), **flags.pop("extra", {})}
        known = {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config": extra,
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        opened.append(Engine(str(tiny_model), **{**FLAGS, **known, **flags}))
        return opened[-1]

    yield open_
    for engine in opened:
        engine.shutdown()


@pytest.fixture
def right(single: Engine) -> dict[str, object]:
    """What an engine without a store answers."""
    return answer(single)


def ask(engine: Engine, prompt: list[int] = PROMPT, **fields: object) -> dict:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True, **fields)


def answer(engine: Engine, prompt: list[int] = PROMPT) -> dict[str, object]:
    return output_of(ask(engine, prompt))


def fill(start: OpenEngine, folder: Path, **flags: object) -> None:
    """An engine computes PROMPT, and stays until its pages are stored."""
    with start(**flags) as engine:
        ask(engine)
        wait_until(lambda: len(pages(folder)) >= KEPT // 16, WAIT_S, "the pages to be stored")


# -- restarts --------------------------------------------------------------------------------


def test_a_restarted_server_answers_from_the_store(tiny_model: Path, folder: Path) -> None:
    extra = json.dumps({"path": str(folder), "prefetch_threshold": 64})
    flags = (
        *("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "4096"),
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", extra),
    )
    found = []
    for life in range(2):
        with serving(folder.parent / f"{life}.log", *flags) as server:
            found.append(http_ask(server))
            wait_until(lambda: len(pages(folder)) >= KEPT // 16, WAIT_S, "the pages to be stored")
            server.signal(signal.SIGTERM)
            assert server.exit_code(60) == 0
    assert output_of(found[0]) == output_of(found[1])
    assert stored_tokens(found[0]) == 0
    assert found[1]["meta_info"]["cached_tokens"] == KEPT
    assert found[1]["meta_info"]["cached_tokens_details"] == {
        "device": 0,
        "host": 0,
        "storage": KEPT,
        "storage_backend": "file",
    }


def test_what_comes_from_the_store_is_what_would_be_computed(start, folder, right) -> None:
    fill(start, folder)
    with start() as again:
        first, second = ask(again), ask(again)
        assert output_of(first) == output_of(second) == right
        assert stored_tokens(first) == KEPT and stored_tokens(second) == 0
        longer = ask(again, PROMPT[:500] + OTHER)
        assert longer["meta_info"]["cached_tokens"] >= 500
    with start() as third:
        found = ask(third, PROMPT[:500] + OTHER)
        assert output_of(found) == output_of(longer)
        assert stored_tokens(found) >= 496


def test_a_server_killed_while_it_writes_leaves_nothing_wrong(
    tiny_model: Path, folder: Path, start, right
) -> None:
    extra = json.dumps({"path": str(folder)})
    flags = (
        *("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "4096"),
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", extra),
    )
    with serving(folder.parent / "killed.log", *flags) as server:
        found = http_ask(server)
        wait_until(lambda: bool(pages(folder)), WAIT_S, "a first page")
        server.kill()
    assert output_of(found) == right
    with start() as again:
        assert answer(again) == right


@pytest.mark.parametrize("length, found", [(500, 0), (900, KEPT)])
def test_a_few_tokens_are_not_looked_for(start, folder, length: int, found: int) -> None:
    fill(start, folder)
    with start(extra={"prefetch_threshold": 600}) as again:
        assert ask(again, PROMPT[:length])["meta_info"]["cached_tokens"] == found


def test_a_journal_of_an_engine_with_a_store_replays(start, folder, tmp_path) -> None:
    fill(start, folder)
    path = str(tmp_path / "journal")
    with start(journal=path, journal_bytes=8 << 20) as engine:
        for prompt in (PROMPT, OTHER, PROMPT[:500] + OTHER[:300], PROMPT):
            ask(engine, prompt)
    report = check(path)
    assert report.ok and report.plans > 4, str(report)


# -- policies --------------------------------------------------------------------------------


def test_the_write_policy_decides_what_is_stored(start, folder) -> None:
    with start(hicache_write_policy="write_through_selective") as engine:
        ask(engine)
        ask(engine, OTHER)
        assert not pages(folder)
        ask(engine)
        wait_until(lambda: len(pages(folder)) == KEPT // 16, WAIT_S, "pages used twice")
    for page in pages(folder):
        page.unlink()
    with start(hicache_write_policy="write_back", max_total_tokens=1024) as engine:
        ask(engine)
        ask(engine, PROMPT[:100])
        assert not pages(folder)
        for prompt in (OTHER, OTHER[::-1]):  # they need the room of the first
            ask(engine, prompt)
        wait_until(lambda: len(pages(folder)) > KEPT // 16, WAIT_S, "pages that were evicted")
    with start() as again:
        assert stored_tokens(ask(again)) == KEPT


def test_the_prefetch_policy_decides_who_waits(start, folder, right) -> None:
    fill(start, folder)
    found = {}
    for policy in ("best_effort", "wait_complete", "timeout"):
        with start(hicache_storage_prefetch_policy=policy) as engine:
            found[policy] = ask(engine)
    assert {p: stored_tokens(f) for p, f in found.items()} == {
        "best_effort": 0,
        "wait_complete": KEPT,
        "timeout": KEPT,
    }
    assert all(output_of(f) == right for f in found.values())


# -- faults ----------------------------------------------------------------------------------


def test_a_store_that_hangs_holds_up_nobody_else(start, folder, monkeypatch, right) -> None:
    fill(start, folder)
    gate = threading.Event()
    read = FileStore.read
    monkeypatch.setattr(FileStore, "read", lambda *args: gate.wait() and read(*args))
    with start() as engine:
        found: list[dict] = []
        waiting = threading.Thread(target=lambda: found.append(ask(engine)))
        waiting.start()
        try:
            for number in range(3):  # whether or not they look for something themselves
                assert ask(engine, OTHER[number:])["meta_info"]["cached_tokens"] < KEPT
            assert not found, "a request that should wait for its pages does not"
        finally:
            gate.set()
            waiting.join(WAIT_S)
        assert output_of(found[0]) == right and stored_tokens(found[0]) == KEPT


def test_a_request_waits_no_longer_than_its_time_limit(start, folder, monkeypatch, right) -> None:
    fill(start, folder)
    gate = threading.Event()
    read = FileStore.read
    monkeypatch.setattr(FileStore, "read", lambda *args: gate.wait() and read(*args))
    extra = {"prefetch_timeout_base": 0.2, "prefetch_timeout_per_ki_token": 0}
    try:
        with start(extra=extra, hicache_storage_prefetch_policy="timeout") as engine:
            found = ask(engine)
            assert output_of(found) == right and stored_tokens(found) == 0
            gate.set()
            assert output_of(ask(engine)) == right
    finally:
        gate.set()


def test_flipped_bits_are_computed_anew(start, folder, right) -> None:
    fill(start, folder)
    for number, page in enumerate(pages(folder)):
        content = bytearray(page.read_bytes())
        content[number * 37 % len(content)] ^= 1 << number % 8
        page.write_bytes(content)
    with start() as again:
        assert answer(again) == right
        wait_until(lambda: len(pages(folder)) >= KEPT // 16, WAIT_S, "the pages to be replaced")
    with start() as third:
        found = ask(third)
        assert output_of(found) == right and stored_tokens(found) == KEPT


def test_a_prefix_is_used_up_to_the_first_page_that_is_wrong(start, folder, right) -> None:
    fill(start, folder)
    before = {page: page.stat().st_mtime_ns for page in pages(folder)}
    damaged = sorted(before, key=lambda page: before[page])[20]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with start() as again:
        found = ask(again)
    assert output_of(found) == right and 0 < stored_tokens(found) < KEPT


def test_a_full_disk_is_reported_once_and_costs_no_answer(
    start, folder, monkeypatch, caplog, right
) -> None:
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Segment, "add", full)
    monkeypatch.setattr(logging.getLogger("banyan"), "propagate", True)
    with caplog.at_level(logging.WARNING), start() as engine:
        assert answer(engine) == right
        ask(engine, OTHER)
        # By identity: other tests leave handlers through which a record comes twice.
        lines = lambda: {id(r) for r in caplog.records if "No space left" in r.getMessage()}  # noqa: E731
        wait_until(lambda: bool(lines()), WAIT_S, "a word about the disk")
        assert answer(engine) == right
    assert len(lines()) == 1 and not pages(folder)


# -- sharing ---------------------------------------------------------------------------------


def test_two_servers_share_one_folder(start, folder, right) -> None:
    one, two = start(), start()
    assert answer(one) == right
    wait_until(lambda: len(pages(folder)) >= KEPT // 16, WAIT_S, "the pages to be stored")
    found = ask(two)
    assert output_of(found) == right and stored_tokens(found) == KEPT
    both = [threading.Thread(target=ask, args=(engine, OTHER)) for engine in (one, two)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(WAIT_S)
    assert answer(two, OTHER) == answer(one, OTHER)


def test_tenants_do_not_find_each_other_s_pages(start, folder) -> None:
    salts = ({"cache_salt": "oak"}, {"cache_salt": "elm"}, {"extra_key": "oak"}, {})
    with start() as engine:
        ask(engine, **salts[0])
        wait_until(lambda: len(pages(folder)) >= KEPT // 16, WAIT_S, "the pages to be stored")
    with start(hicache_write_policy="write_back") as again:
        found = [ask(again, **salt)["meta_info"]["cached_tokens"] for salt in reversed(salts)]
    assert found == [0, 0, 0, KEPT]


def test_other_weights_find_nothing(start, folder, tiny_model, tmp_path) -> None:
    fill(start, folder)
    other = write_tiny_model(tmp_path / "other", seed=8)
    extra = {"path": str(folder)}
    with Engine(
        str(other),
        enable_hierarchical_cache=True,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=extra,
        hicache_storage_prefetch_policy="wait_complete",
        **FLAGS,
    ) as engine:
        assert ask(engine)["meta_info"]["cached_tokens"] == 0


def test_weights_that_are_taken_later_have_no_part_in_the_store(
    start, folder, right, tmp_path, tiny_model
) -> None:
    fill(start, folder)
    before = pages(folder)
    other = write_tiny_model(tmp_path / "other", seed=8)
    with start() as engine:
        assert answer(engine) == right
        reply = engine.update_weights_from_disk(str(other))
        assert "not stored" in str(reply)
        changed = ask(engine)
        assert output_of(changed) != right and changed["meta_info"]["cached_tokens"] == 0
        ask(engine, OTHER)
        assert output_of(ask(engine)) == output_of(changed)
    assert pages(folder) == before


def test_many_requests_for_one_stored_prefix_read_it_once(
    start, folder, monkeypatch, right
) -> None:
    fill(start, folder)
    reads, read = [], FileStore.read
    monkeypatch.setattr(FileStore, "read", lambda *args: reads.append(1) or read(*args))
    # No speed is measured, so that none computes because this machine reads slowly just now.
    monkeypatch.setattr(StoreFetcher, "note_read", lambda *args: None)
    with start() as engine:
        found: list[dict] = []
        threads = [threading.Thread(target=lambda: found.append(ask(engine))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert [output_of(f) for f in found] == [right] * 6
    assert len(reads) == KEPT // 16
    assert all(f["meta_info"]["cached_tokens"] >= KEPT for f in found)


def test_a_replica_of_dp_attention_finds_what_another_has_stored(
    start: OpenEngine, folder: Path, right: dict
) -> None:
    engine = start(tp_size=2, dp_size=2, enable_dp_attention=True, engine_mode="normal")
    here = ask(engine, data_parallel_rank=0)
    wait_until(lambda: len(pages(folder)) >= KEPT // 16, WAIT_S, "the pages to be kept")
    there = ask(engine, data_parallel_rank=1)
    assert (stored_tokens(here), stored_tokens(there)) == (0, KEPT)
    assert output_of(here)["ids"] == output_of(there)["ids"] == right["ids"]
