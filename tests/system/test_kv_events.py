"""What an engine tells of its cache over ZeroMQ, as a router hears it."""

import contextlib
import json
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from banyan.base.errors import ConfigError
from banyan.config.observability import kv_events
from banyan.config.schema import ObserveConfig
from banyan.llm import Engine
from banyan.lora.scheduling import id_of
from tests.support.flags import config_of
from tests.support.lora import write_adapter
from tests.system.serving import free_port, launch, wait_ready, wait_until

PROMPT = list(range(5, 45))
ASKED = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
WAIT_MS = 10_000


def config(port: int, replay: int, **more: object) -> str:
    own = {"publisher": "zmq", "topic": "kv", "endpoint": f"tcp://127.0.0.1:{port}", "bind": True}
    return json.dumps({**own, "replay_endpoint": f"tcp://127.0.0.1:{replay}", **more})


@contextlib.contextmanager
def reader(kind: int, port: int) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    made = context.socket(kind)
    made.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    if kind == zmq.SUB:
        made.setsockopt(zmq.SUBSCRIBE, b"kv")
    made.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield made
    finally:
        context.destroy(0)


def replayed(port: int, first: int = 0) -> list[tuple[int, list]]:
    """All batches from a number on."""
    found: list[tuple[int, list]] = []
    with reader(zmq.DEALER, port) as asking:
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            _, topic, number, batch = asking.recv_multipart()
            assert topic == b"kv"
            at = int.from_bytes(number, "big", signed=True)
            if at < 0:
                assert batch == b""
                return found
            found.append((at, msgspec.msgpack.decode(batch)))


@pytest.fixture(params=["map", "array"])
def publisher(request, tiny_model, tmp_path):
    """(server, its ports, encoding) of an engine that tells."""
    ports = free_port(), free_port()
    flags = ("--kv-events-config", config(*ports, encoding=request.param), "--page-size", "16")
    running = launch(tmp_path / "server.log", "--model-path", str(tiny_model), *flags)
    try:
        wait_ready(running)
        yield running, ports, request.param
    finally:
        running.kill()


def fields(event: object, encoding: str) -> dict:
    if encoding == "map":
        return dict(event)
    kind, *values = event
    names = {
        "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium"
        + " lora_name" * (len(values) == 7),
        "BlockRemoved": "block_hashes medium",
        "AllBlocksCleared": "",
    }[kind].split()
    return {"type": kind, **dict(zip(names, values, strict=True))}


def test_a_reader_knows_what_the_cache_holds(publisher):
    running, (port, replay), encoding = publisher
    found = running.facts()["kv_events"]
    assert found["endpoint"] == f"tcp://127.0.0.1:{port}" and found["block_size"] == 16
    with reader(zmq.SUB, port) as hearing:
        wait_until(lambda: replayed(replay), 60, "the first batch")
        running.generate(**ASKED)
        topic, number, batch = hearing.recv_multipart()
    assert topic == b"kv" and len(number) == 8
    seconds, (event,), replica = msgspec.msgpack.decode(batch)
    stored = fields(event, encoding)
    assert seconds > 1.7e9 and replica == 0
    assert stored["type"] == "BlockStored" and stored.get("parent_block_hash") is None
    assert stored["token_ids"] == PROMPT[:32] and stored["block_size"] == 16
    assert len(stored["block_hashes"]) == 2 and stored["medium"] == "GPU"

    running.http.post("/flush_cache")
    events = [fields(event, encoding) for _, (_, events, _) in replayed(replay) for event in events]
    assert events[0]["type"] == "AllBlocksCleared"
    wait_until(
        lambda: (
            sorted(
                name
                for _, (_, events, _) in replayed(replay)
                for event in events
                for name in fields(event, encoding).get("block_hashes", [])
                if fields(event, encoding)["type"] == "BlockRemoved"
            )
            >= sorted(stored["block_hashes"])
        ),
        60,
        "the removal to be reported",
    )


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_what_is_stored_of_an_adapter_says_whose_it_is(encoding, tiny_model, tmp_path):
    replay, names = free_port(), ("sql", "chat")
    paths = [f"{name}={write_adapter(tmp_path / name, i)}" for i, name in enumerate(names)]
    asked = json.loads(config(free_port(), replay, encoding=encoding))
    flags = {"kv_events_config": asked, "lora_paths": paths, "page_size": 16, "threads": 1}
    with Engine(str(tiny_model), engine_mode="inprocess", **flags) as engine:
        for name in (None, *names, "sql"):
            engine.generate(**ASKED, lora_path=name)
        wait_until(lambda: len(stored_of(replay, encoding)) >= 3, 60, "three prefixes")
        found = stored_of(replay, encoding)
    assert [event.get("lora_name") for event in found] == [None, *names]
    assert [event.get("lora_id") for event in found] == [None, *map(id_of, names)]
    assert len({tuple(event["block_hashes"]) for event in found}) == 3


def stored_of(replay: int, encoding: str) -> list[dict]:
    events = [fields(event, encoding) for _, (_, some, _) in replayed(replay) for event in some]
    return [event for event in events if event["type"] == "BlockStored"]


def test_who_missed_some_gets_them_from_a_number_on(publisher):
    running, (_, replay), _ = publisher
    running.generate(**ASKED)
    wait_until(lambda: len(replayed(replay)) >= 2, 60, "two batches")
    everything = replayed(replay)
    assert [number for number, _ in everything] == list(range(len(everything)))
    assert replayed(replay, 1) == everything[1:]


@pytest.mark.parametrize(
    ("given", "publisher"),
    [
        ({"publisher": "kafka"}, "publisher must be one of zmq, null"),
        ({"endpoints": "x"}, "has no 'endpoints'. Keys are publisher"),
        ({"hwm": 0}, "hwm must be an integer in"),
        ({"hwm": 2**31}, "hwm must be an integer in"),
        ({"hwm": True}, "hwm must be an integer in"),
        ({"topic": 1}, "topic must be a str"),
        ({"endpoint": "5557"}, "'5557' is no endpoint"),
        ({"endpoint": "tcp://*:99999"}, "is no endpoint"),
        ({"encoding": "json"}, "encoding must be one of map, array"),
    ],
)
def test_what_is_wrong_with_the_configuration_is_reported(given, publisher):
    with pytest.raises(ConfigError, match=publisher.replace("(", r"\(").replace("[", r"\[")):
        kv_events(ObserveConfig(kv_events={"publisher": "zmq", **given}))


def test_nothing_is_reported_unless_asked_for():
    assert kv_events(config_of().observe) is None
    asked = config_of("--kv-events-config", '{"publisher": "null", "bind": null}').observe
    assert kv_events(asked) is None


def test_each_replica_has_a_port_of_its_own():
    asked = kv_events(ObserveConfig(kv_events={"publisher": "zmq"}))
    assert asked is not None and asked.is_bound
    assert [asked.of(asked.endpoint, n) for n in (0, 1)] == ["tcp://*:5557", "tcp://*:5558"]
    assert asked.of("ipc:///tmp/x", 2) == "ipc:///tmp/x-2"
