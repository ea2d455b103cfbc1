"""Ranks on two nodes, which here are two programs that share nothing but a socket."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest

from banyan.llm import Engine
from tests.support.lora import write_adapter
from tests.support.nodes import FEW, GREEDY, PROMPTS, node, outputs, over_nodes
from tests.support.port_scan import ports_of, scanned
from tests.system.checkpoint import write_tiny_model
from tests.system.handing import Servers
from tests.system.serving import (
    CALL_S,
    Server,
    free_port,
    runs,
    serving,
    settled,
    status_of,
    wait_ready,
    wait_until,
)

OUTER = pytest.mark.skipif(not os.environ.get("PARALLEL"), reason="make test-parallel")


def test_two_nodes_give_the_tokens_of_one_rank(tiny_model, tmp_path, monkeypatch):
    """Of the model, of an adapter of the start, and of one that is loaded later; also while
    strangers connect to every port of both."""
    monkeypatch.setenv("BANYAN_DIST_SECRET", "a long random text")
    port = free_port()
    late = {"lora_name": "b", "lora_path": str(write_adapter(tmp_path / "b", 2))}
    flags = ("--lora-paths", f"a={write_adapter(tmp_path / 'a', 1)}", "--cpu-activations", "fp32")

    def with_adapters(server: Server) -> list[list[list[int]]]:
        assert server.http.post("/load_lora_adapter", json=late).status_code == 200
        return [outputs(server, name) for name in "ab"]

    with serving(tmp_path / "one.log", "--model-path", str(tiny_model), *FEW, *flags) as one:
        expected, adapted = outputs(one), with_adapters(one)
        assert expected not in adapted and adapted[0] != adapted[1]

    with (
        node(tmp_path, 1, port, tiny_model, *flags) as other,
        node(tmp_path, 0, port, tiny_model, *flags) as first,
    ):
        wait_ready(first)
        ranks = [p for p in other.members() if runs(p, "banyan.server.processes")]
        assert len(first.rank_pids()) == 0 and len(ranks) == 1
        everybody = [pid for each in (first, other) for pid in (each.pid, *each.members())]
        assert port in ports_of(everybody) and len(ports_of(everybody)) > 2
        with scanned(everybody):
            assert outputs(first) == expected
        assert outputs(first) == expected and with_adapters(first) == adapted
        weights = {"model_path": str(write_tiny_model(tmp_path / "new", seed=1))}
        answer = first.http.post("/update_weights_from_disk", json=weights)
        assert answer.status_code == 200, answer.text
        assert outputs(first) != expected
        weights = {"model_path": str(tiny_model)}
        assert first.http.post("/update_weights_from_disk", json=weights).status_code == 200
        assert outputs(first) == expected
        first.signal(signal.SIGTERM)
        assert first.exit_code(60) == 0
        assert other.exit_code(60) == 0, other.tail()
    assert not psutil.pid_exists(ranks[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=OUTER)])
def test_a_lost_rank_of_another_node_ends_the_replica_and_is_named(number, tiny_model, tmp_path):
    port = free_port()
    flags = ("--engine-restarts", "0")
    with (
        node(tmp_path, 1, port, tiny_model, *flags) as other,
        node(tmp_path, 0, port, tiny_model, *flags) as first,
    ):
        wait_ready(first)
        if number == signal.SIGKILL:
            (rank,) = [p for p in other.members() if runs(p, "banyan.server.processes")]
            os.kill(rank, number)
            assert first.exit_code(60) != 0
            assert "node 1: rank1" in first.tail() and "SIGKILL" in first.tail()
        else:
            os.kill(other.pid, number)
            assert first.exit_code(60) != 0
            assert "node 1 has sent nothing" in first.tail()


def ranks_at(other: Server) -> list[int]:
    return [p for p in other.members() if runs(p, "banyan.server.processes")]


@pytest.mark.parametrize("who", [pytest.param("engine", marks=OUTER), "rank"])
def test_a_node_comes_again_to_the_engine_that_takes_the_place_of_a_lost_one(
    who, tiny_model, tmp_path
):
    port = free_port()
    with node(tmp_path, 1, port, tiny_model) as other, node(tmp_path, 0, port, tiny_model) as first:
        wait_ready(first)
        expected = outputs(first)
        lost = first.engine_pid() if who == "engine" else ranks_at(other)[0]
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: status_of(first, "/readyz") == 503, 60.0, "the loss to be noticed")
        wait_until(lambda: status_of(first, "/readyz") == 200, 60.0, "both to serve again")
        assert outputs(first) == expected and lost not in (first.engine_pid(), *ranks_at(other))
        first.signal(signal.SIGTERM)
        assert first.exit_code(60) == 0
        assert other.exit_code(60) == 0, other.tail()


@OUTER
@pytest.mark.parametrize("spread", ["prefill", "decode", "both"])
def test_servers_on_several_nodes_hand_over(spread: str, tiny_model, tmp_path):
    """Pages leave ranks of another node, and come to them."""
    port = free_port()
    roles = {
        "prefill": ("--disaggregation-bootstrap-port", str(port), "--chunked-prefill-size", "32"),
        "decode": (),
    }
    with Engine(str(tiny_model), engine_mode="inprocess", threads=1) as one:
        expected = [one.generate(input_ids=p, sampling_params=GREEDY) for p in PROMPTS]
    with ExitStack() as stack:
        started = []
        for role, flags in roles.items():
            words = ("--disaggregation-mode", role, *flags)
            if spread in (role, "both"):
                server = over_nodes(tmp_path / role, tiny_model, *words)
            else:
                own = ("--model-path", str(tiny_model), *FEW, *words)
                server = serving(tmp_path / f"{role}.log", *own)
            started.append(stack.enter_context(server))
        pair = Servers(*started, port)
        for _ in range(2):  # computed, then from the caches of both
            for prompt, right in zip(PROMPTS, expected, strict=True):
                body = {"input_ids": prompt, "sampling_params": GREEDY}
                answers = [each.result(CALL_S) for each in pair.start("/generate", body)]
                assert answers[1].json()["output_ids"] == right["output_ids"], answers[0].text
        behind = sum(len(prompt) % 16 + 8 for prompt in PROMPTS)
        assert settled(pair.decode.stats, 7)["computed_tokens"] <= 2 * behind + 8, "pages came"


@OUTER
def test_a_node_whose_leader_is_gone_ends(tiny_model, tmp_path):
    port, flags = free_port(), ("--dist-timeout", "12")
    with node(tmp_path, 1, port, tiny_model, *flags) as other:
        with node(tmp_path, 0, port, tiny_model) as first:
            wait_ready(first)
            first.kill()
            assert other.exit_code(60) != 0
        assert "the leader has sent nothing" in other.tail()
        assert "did not answer within 12 s" in other.tail()


def test_a_node_that_does_not_come_is_named(tiny_model, tmp_path):
    with node(tmp_path, 0, free_port(), tiny_model, "--dist-timeout", "2") as first:
        assert first.exit_code(60) != 0
        assert "node 1 of 2 did not come within 2 s" in first.tail()


def test_a_node_with_other_weights_is_turned_away_on_both_sides(tiny_model, tmp_path):
    port, others = free_port(), write_tiny_model(tmp_path / "others", seed=1)
    flags = ("--dist-timeout", "60")
    with node(tmp_path, 1, port, others) as other, node(tmp_path, 0, port, tiny_model, *flags) as a:
        assert other.exit_code(60) != 0
        assert "the leader turned this node away: it has another model" in other.tail()
        wait_until(lambda: "node 1 was turned away" in a.tail(), 60.0, "a line about it")


def test_nodes_that_others_may_reach_need_a_secret(tiny_model, tmp_path):
    with node(tmp_path, 1, 1, tiny_model, "--dist-init-addr", "192.0.2.1:29500") as other:
        assert other.exit_code(60) == 2
        assert "Set BANYAN_DIST_SECRET to the same" in other.tail()


JOINED = ("--enable-dp-attention", "--dp-size", "2", "--cpu-activations", "fp32")


def asked_of(server: Server, replica: int) -> list[int]:
    body = {"input_ids": PROMPTS[1], "sampling_params": GREEDY, "routed_dp_rank": replica}
    return server.generate(**body)["output_ids"]


@OUTER
def test_joined_replicas_lie_on_several_nodes(tiny_model, tmp_path):
    """Each replica answers as one rank does, with company and without; a lost one comes again."""
    port = free_port()
    with serving(tmp_path / "one.log", "--model-path", str(tiny_model), *FEW, *JOINED[-2:]) as one:
        expected, alone = outputs(one), asked_of(one, 0)
    with (
        node(tmp_path, 1, port, tiny_model, *JOINED) as other,
        node(tmp_path, 0, port, tiny_model, *JOINED) as first,
    ):
        wait_ready(first)
        assert len(first.engine_pids()) == 1 and len(ranks_at(other)) == 1
        assert outputs(first) + outputs(first) == expected * 2
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda n: asked_of(first, n % 2), range(4))) == [alone] * 4
        lost = ranks_at(other)[0]
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: status_of(first, "/readyz") == 503, 60.0, "the loss to be noticed")
        assert "node 1: engine1" in first.log.read_text()
        wait_until(lambda: status_of(first, "/readyz") == 200, 60.0, "both to serve again")
        assert [asked_of(first, n) for n in range(2)] == [alone] * 2
        first.signal(signal.SIGTERM)
        assert first.exit_code(60) == 0
        assert other.exit_code(60) == 0, other.tail()
