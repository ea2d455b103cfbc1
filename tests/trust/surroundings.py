"""A server in surroundings that are not usual: few descriptors, another locale and hash seed,
signals of terminals, no IPv4."""

import contextlib
import os
import resource
import signal
import socket

import httpx
import pytest

from tests.system.serving import CALL_S, launch, status_of, wait_ready, wait_until

ASKED = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}


def test_with_few_descriptors_a_server_recovers_from_too_many_connections(server):
    with server() as running:
        expected = running.generate(**ASKED)["output_ids"]
        for pid in (running.pid, *running.members()):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
        held = []
        for _ in range(100):
            client = socket.socket()
            client.settimeout(5.0)
            with contextlib.suppress(OSError):
                client.connect(("127.0.0.1", running.port))
            held.append(client)
        for client in held:
            client.close()
        wait_until(lambda: status_of(running, "/health") == 200, CALL_S, "the server to recover")
        assert httpx.post(f"{running.url}/generate", json=ASKED).json()["output_ids"] == expected


@pytest.mark.parametrize(
    "variables",
    [{"LC_ALL": "C"}, {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "LC_ALL": "POSIX"}],
    ids=str,
)
def test_neither_locale_nor_hash_seed_changes_an_answer(server, monkeypatch, variables):
    text = {"text": "é 日本 the banyan", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    with server() as running:
        expected = running.generate(**text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with server() as running:
        found = running.generate(**text)
    assert (found["text"], found["output_ids"]) == (expected["text"], expected["output_ids"])


def test_a_broken_pipe_ends_nothing(server):
    with server() as running:
        expected = running.generate(**ASKED)["output_ids"]
        os.kill(running.pid, signal.SIGPIPE)
        os.kill(running.engine_pid(), signal.SIGPIPE)
        assert running.generate(**ASKED)["output_ids"] == expected


def test_a_server_may_listen_on_ipv6_alone(tiny_model, tmp_path):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    flags = ("--model-path", str(tiny_model), "--host", "::1", "--threads", "1")
    running = launch(tmp_path / "server.log", *flags)
    running.url = f"http://[::1]:{running.port}"
    running.http = httpx.Client(base_url=running.url, timeout=CALL_S)
    try:
        wait_ready(running)
        assert running.generate(**ASKED)["output_ids"]
    finally:
        running.kill()
