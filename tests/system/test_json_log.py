"""--log-format json: every line on standard error is an object, all writers alike; and the bill of
named keys, in lines and in metrics."""

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from banyan.base.child_process import STACKS
from tests.system.serving import Server, serving, wait_until

KEYS = """
keys:
  - {name: research, key: [sk-new, sk-old]}
  - {name: shop, key: sk-shop}
"""
ASKED = {"text": "One two", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
ENDED_S = 60.0


def ask(server: Server, key: str, **more: object) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/generate", json={**ASKED, **more}, headers=headers).status_code


def objects(server: Server) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert all(isinstance(line, dict) for line in lines)
    return lines


@pytest.fixture(scope="module")
def billed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("billed")
    keys = folder / "keys.yaml"
    keys.write_text(KEYS)
    flags = ["--model-path", str(tiny_model), "--threads", "1", "--log-format", "json"]
    flags += ["--log-requests", "--log-requests-level", "0", "--api-key-file", str(keys)]
    with serving(folder / "server.log", *flags, "--enable-metrics") as server:
        for key in ("sk-new", "sk-old", "sk-shop"):
            assert ask(server, key) == 200
        assert ask(server, "sk-shop", sampling_params={"max_new_tokens": -1}) == 400
        wait_until(lambda: "request refused" in server.log.read_text(), ENDED_S, "the last line")
        yield server


def test_a_line_of_a_request_names_its_key(billed: Server) -> None:
    lines = [line for line in objects(billed) if str(line.get("event")).startswith("request")]
    lines = [line for line in lines if line["route"] not in ("warm-up", "probe")]
    ended = [line["key"] for line in lines if line["event"] == "request ended"]
    assert ended == ["research", "research", "shop"]
    assert [line["key"] for line in lines if line["event"] == "request refused"] == ["shop"]


def test_each_named_key_has_its_requests_and_tokens_in_the_metrics(billed: Server) -> None:
    found = {
        (sample.name, sample.labels["key_name"]): sample.value
        for family in text_string_to_metric_families(billed.http.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("banyan:key_") and sample.name.endswith("_total")
    }
    for name, requests in (("research", 2), ("shop", 1)):
        assert found["banyan:key_requests_total", name] == requests
        assert found["banyan:key_generation_tokens_total", name] == 3 * requests
        assert (
            found["banyan:key_prompt_tokens_total", name]
            == found["banyan:key_prompt_tokens_total", "shop"] * requests
        )
    assert found["banyan:key_cached_tokens_total", "shop"] == 0  # tenants share no cache


def test_every_line_of_a_server_is_an_object(billed: Server) -> None:
    os.kill(billed.engine_pid(), STACKS)  # written past every logger
    wait_until(lambda: "most recent call" in billed.log.read_text(), ENDED_S, "stacks")
    billed.signal(signal.SIGTERM)
    assert billed.exit_code(ENDED_S) == 0
    lines = objects(billed)
    roles = {line.get("role") for line in lines if "event" not in line}
    assert {"server", "other"} <= roles and any(str(role).startswith("engine") for role in roles)
    assert all(
        {"time", "level", "role", "message"} <= set(line) or "event" in line for line in lines
    )
    wait_until(lambda: not billed.members(), ENDED_S, "the end of all its processes")
