"""The processes of a server: what they load, how they notice each other's end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.streams import (
    ENDLESS,
    LONG,
    STREAMS,
    Stream,
    ends_in_one_error,
    finished,
    load,
)
from tests.system.checkpoint import write_tiny_model
from tests.system.serving import (
    CALL_S,
    ROOT,
    Server,
    launch,
    status_of,
    wait_ready,
    wait_until,
)

OUTER = pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults")
"""Deaths that take a deadline or two to see; what is lost and replaced is seen without them."""


# -- what is loaded ---------------------------------------------------------------------------


def test_the_api_process_maps_no_torch_library(shared_server):
    maps = Path(f"/proc/{shared_server.pid}/maps").read_text()
    assert "torch" not in maps
    assert "torch" in Path(f"/proc/{shared_server.engine_pid()}/maps").read_text()


def test_libraries_that_are_seldom_needed_are_not_loaded_at_the_start(tiny_model, tmp_path):
    """ZeroMQ is in a server for engines far away, the tokenizer in an engine for constraints."""
    server = launch(tmp_path / "server.log", "--model-path", str(tiny_model))
    try:
        wait_ready(server)
        front, engine = (
            Path(f"/proc/{pid}/maps").read_text() for pid in (server.pid, server.engine_pid())
        )
        assert "/tokenizers" in front and "/numpy" in engine
        assert "/zmq" not in front and "/numpy" not in front
        assert "/tokenizers" not in engine
    finally:
        server.kill()


@pytest.mark.parametrize("module", ["banyan.scheduler.scheduler", "banyan.kv_cache.cache"])
def test_deciding_rooms_import_without_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_livez_answers_before_the_engine_is_ready(tiny_model, tmp_path):
    server = launch(tmp_path / "server.log", "--model-path", str(tiny_model))
    try:
        wait_until(lambda: status_of(server, "/livez") == 200, CALL_S, "/livez")
        assert status_of(server, "/readyz") == 503
        assert status_of(server, "/health") == 503
        wait_ready(server)
        assert status_of(server, "/health") == 200
    finally:
        server.kill()


# -- the engine dies or stops -----------------------------------------------------------------


BACK_S = 120.0
"""A tiny model is served again within two or three; the machine may be busy."""


@contextmanager
def held_back(server: Server, lost: int) -> Iterator[None]:
    """The engine that takes the place of the one with this pid goes on starting after the block."""
    started = lambda: [pid for pid in server.engine_pids() if pid != lost]  # noqa: E731
    wait_until(lambda: len(started()) == 1, CALL_S, "the next engine")
    (engine,) = started()
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


def go_on(server: Server, streams: list[Stream], seen: list[int]) -> None:
    """Each stream has more events than were `seen`; then all are aborted."""
    for stream, num_events in zip(streams, seen, strict=True):
        wait_until(lambda s=stream, n=num_events: len(s.events) > n, CALL_S, "a stream to go on")
    server.http.post("/abort_request", json={"abort_all": True}).raise_for_status()
    for stream in streams:
        assert finished(stream.end(CALL_S)) == ["abort"]


def is_back(server: Server) -> None:
    """Wait until the server serves again by itself, and ask it."""
    wait_until(lambda: status_of(server, "/readyz") == 200, BACK_S, "the server to serve again")
    assert status_of(server, "/health") == 200
    assert server.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 2})
    wait_until(lambda: server.stats()["held_pages"] == 0, 60.0, "all pages to be let go")


def test_a_killed_engine_ends_what_has_begun_with_one_error_and_is_started_again(server):
    flags = ("--max-running-requests", str(STREAMS), *ENDLESS)
    with server(*flags) as running, ThreadPoolExecutor(2) as pool:
        streams = load(running, STREAMS - 1)
        body = {"input_ids": [5], "sampling_params": LONG}
        whole = pool.submit(httpx.post, f"{running.url}/generate", json=body, timeout=CALL_S)
        wait_until(lambda: running.stats()["running"] == STREAMS, 60.0, "all requests to run")
        short = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
        queued = pool.submit(httpx.post, f"{running.url}/generate", json=short, timeout=CALL_S)
        wait_until(lambda: running.stats()["waiting"] == 1, 60.0, "a request to wait")
        engine = running.engine_pid()
        os.kill(engine, signal.SIGKILL)
        with held_back(running, engine):
            assert status_of(running, "/health") == 503
            refused = running.http.get("/readyz")
            assert refused.status_code == 503 and "SIGKILL" in refused.text
            assert "is being started again (1 of 5)" in refused.text
            assert status_of(running, "/livez") == 200
            for stream in streams:
                assert ends_in_one_error(stream.end(CALL_S))
            assert whole.result(CALL_S).status_code == 503
            late = running.http.post("/generate", json=short)
            assert late.status_code == 503 and "SIGKILL" in late.text
            assert "retry-after" in late.headers
        is_back(running)
        answer = queued.result(60.0)
        assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 3
        assert running.engine_pid() != engine and not psutil.pid_exists(engine)


@OUTER
def test_a_server_that_may_not_start_engines_again_ends_with_the_first_death(server):
    with server("--engine-restarts", "0", *ENDLESS) as running:
        streams = load(running, count=2)
        os.kill(running.engine_pid(), signal.SIGKILL)
        wait_until(lambda: status_of(running, "/health") == 503, 60.0, "/health to be 503")
        for stream in streams:
            assert ends_in_one_error(stream.end(60.0))
        assert "SIGKILL" in running.http.get("/readyz").text
        assert running.exit_code(60.0) != 0  # after it has reported to probes why
        assert running.members() == []


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_replica_is_started_again(server):
    with server("--tp-size", "2", *ENDLESS) as running:
        streams = load(running, count=2)
        engine, (rank,) = running.engine_pid(), running.rank_pids()
        os.kill(rank, signal.SIGKILL)
        with held_back(running, engine):
            for stream in streams:
                assert ends_in_one_error(stream.end(CALL_S))
            late = running.http.get("/readyz")
            assert late.status_code == 503 and "rank1" in late.text and "SIGKILL" in late.text
        is_back(running)
        assert len(running.rank_pids()) == 1 and rank not in running.rank_pids()


@pytest.mark.slow
def test_an_engine_that_comes_back_has_the_weights_and_the_pause_of_the_lost_one(server, tmp_path):
    other = write_tiny_model(tmp_path / "other", seed=7)
    with server() as running:
        asked = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
        before = running.generate(**asked)["output_ids"]
        taken = running.http.post(
            "/update_weights_from_disk", json={"model_path": str(other), "weight_version": "two"}
        )
        assert taken.status_code == 200, taken.text
        after = running.generate(**asked)
        assert after["output_ids"] != before
        running.http.post("/pause_generation", json={"mode": "in_place"})
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(running.generate, **asked)
            wait_until(lambda: running.stats()["waiting"] == 1, 60.0, "a request to wait")
            os.kill(running.engine_pid(), signal.SIGKILL)
            wait_until(lambda: status_of(running, "/health") == 503, 60.0, "/health to be 503")
            wait_until(lambda: status_of(running, "/health") == 200, BACK_S, "the server")
            assert "paused" in running.http.get("/readyz").text
            assert running.stats()["running"] == 0 and not waiting.done()
            running.http.post("/continue_generation", json={})
            again = waiting.result(CALL_S)
        assert again["output_ids"] == after["output_ids"]
        assert again["meta_info"]["weight_version"] == "two"


def test_a_server_whose_engine_is_killed_while_it_loads_ends_with_an_error(tiny_model, tmp_path):
    running = launch(tmp_path / "server.log", "--model-path", str(tiny_model))
    try:
        wait_until(lambda: len(running.engine_pids()) == 1, CALL_S, "the engine to start")
        subprocess.run(["kill", "-9", str(running.engine_pid())], check=True)
        assert 2 <= running.exit_code(60.0) <= 9
        assert "SIGKILL" in running.log.read_text()
    finally:
        running.kill()


def test_a_stopped_engine_is_unhealthy_after_the_deadline_and_is_replaced(server):
    with server("--watchdog-timeout", "3", *ENDLESS) as running:
        streams = load(running, count=2)
        engine = running.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        with held_back(running, engine):
            assert status_of(running, "/health") == 503
            for stream in streams:
                events = stream.end(CALL_S)
                assert ends_in_one_error(events) and "No heartbeat" in str(events[-1])
            late = running.http.post("/generate", json={"input_ids": [5], "sampling_params": {}})
            assert late.status_code == 503 and "No heartbeat" in late.text
        is_back(running)
        assert running.engine_pid() != engine and not psutil.pid_exists(engine)
        assert "does not answer (it was stopped by a signal): killed" in running.log.read_text()


@OUTER
def test_a_stopped_engine_that_is_not_replaced_serves_again_when_it_goes_on(server):
    flags = ("--engine-restarts", "0", "--watchdog-timeout", "3")
    with server(*flags, *ENDLESS) as running:
        streams = load(running, count=2)
        engine = running.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: status_of(running, "/health") == 503, 60.0, "/health to be 503")
        for stream in streams:
            assert ends_in_one_error(stream.end(60.0))
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: status_of(running, "/health") == 200, 60.0, "/health to recover")
        assert running.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 2})
        wait_until(lambda: running.stats()["running"] == 0, 60.0, "what was ended to be let go")


@OUTER
def test_a_stopped_rank_is_named_after_the_deadline_and_the_replica_is_started_again(server):
    with server("--tp-size", "2", "--watchdog-timeout", "3", *ENDLESS) as running:
        (rank,) = running.rank_pids()
        os.kill(rank, signal.SIGSTOP)
        # Nothing runs: that the rank is gone is seen all the same.
        wait_until(lambda: status_of(running, "/health") == 503, 60.0, "/health to be 503")
        assert "Rank 1 has not run for" in running.http.get("/health").text
        is_back(running)
        streams = load(running, count=2)
        (rank,) = running.rank_pids()
        os.kill(rank, signal.SIGSTOP)
        for stream in streams:
            assert ends_in_one_error(stream.end(60.0))
        wait_until(lambda: "in flight: step=" in running.log.read_text(), 60.0, "the log to tell")
        assert "thread runner:" in running.log.read_text()
        is_back(running)
        assert not psutil.pid_exists(rank)


@pytest.mark.slow
def test_a_slow_step_is_reported_to_the_log_and_ends_nothing(server):
    flags = ("--tp-size", "2", "--soft-watchdog-timeout", "0.5", "--log-level", "warning")
    with server(*flags, *ENDLESS) as running:
        streams = load(running, count=2)
        (rank,) = running.rank_pids()
        os.kill(rank, signal.SIGSTOP)
        report = f"stack traces of rank 1:\npid {rank} was stopped by a signal"
        wait_until(lambda: report in running.log.read_text(), CALL_S, "a report in the log")
        seen = [len(stream.events) for stream in streams]
        os.kill(rank, signal.SIGCONT)
        go_on(running, streams, seen)
        log = running.log.read_text()
        assert "in flight: step=" in log and "queues: running=2" in log and "thread runner:" in log
        assert running.rank_pids() == [rank]


def test_an_engine_that_pauses_shorter_than_the_deadline_causes_no_error(server):
    with server("--watchdog-timeout", "60", *ENDLESS) as running:
        streams = load(running, count=2)
        engine = running.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        time.sleep(0.5)  # the pause itself is what is tested
        seen = [len(stream.events) for stream in streams]
        os.kill(engine, signal.SIGCONT)
        assert status_of(running, "/health") == 200
        go_on(running, streams, seen)


def test_no_child_inherits_a_key_or_is_given_one(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("BANYAN_API_KEY", "sesame-in-the-environment")
    monkeypatch.setenv("HF_TOKEN", "hf-in-the-environment")
    running = launch(tmp_path / "server.log", "--model-path", str(tiny_model))
    try:
        wait_ready(running)
        headers = {"authorization": "Bearer sesame-in-the-environment"}
        asked = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2, "regex": "a+"}}
        assert running.http.post("/generate", json=asked, headers=headers).status_code != 401
        assert running.http.post("/generate", json=asked).status_code == 401
        assert len(running.members()) >= 1
        for pid in running.members():
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"in-the-environment" not in environment and b"PATH=" in environment
    finally:
        running.kill()


@pytest.mark.slow
def test_one_of_two_replicas_dies_the_other_serves_on_and_the_lost_one_comes_back(server):
    turns = ("--load-balance-method", "round_robin")  # two streams for each
    with server("--dp-size", "2", *turns, *ENDLESS) as running:
        engines = running.engine_pids()
        assert len(engines) == 2
        streams = load(running, count=4)
        subprocess.run(["kill", "-9", str(engines[0])], check=True)
        wait_until(lambda: sum(s.has_ended for s in streams) == 2, CALL_S, "two streams to end")
        lost = [stream for stream in streams if stream.has_ended]
        assert all(ends_in_one_error(stream.end(0)) for stream in lost)
        assert status_of(running, "/health") == 200
        httpx.post(f"{running.url}/abort_request", json={"abort_all": True}).raise_for_status()
        kept = [stream.end(CALL_S) for stream in streams if stream not in lost]
        assert all(finished(events) == ["abort"] for events in kept)
        answers = [running.generate(input_ids=[5, 6, 7]) for _ in range(3)]
        assert all(answer["meta_info"]["finish_reason"] for answer in answers)
        wait_until(lambda: len(running.facts()["internal_states"]) == 2, BACK_S, "the lost one")
        left, back = running.engine_pids()
        assert engines[1] in (left, back) and engines[0] not in (left, back)
        for _ in range(2):
            running.generate(input_ids=[5, 6, 7])
        parts = [state["stats"] for state in running.facts()["internal_states"]]
        assert all(part["steps"] for part in parts)
