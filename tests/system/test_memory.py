"""A server that gives its memory back to the system while nobody needs it, and takes it again."""

import pytest

from tests.support.crowd import asking
from tests.support.pauses import Asking, go_on, pause, wait_running
from tests.system import checkpoint
from tests.system.serving import Server, serving, settled, wait_until

MIB = 1 << 20
CACHE_BYTES = 14 * MIB
"""Of K and V of PROMPT, in fp16: 2 · 4 layers · 8 heads · 128 · 2 bytes for each of its tokens."""
WEIGHT_BYTES = 30 * MIB
PROMPT = {
    "input_ids": [5 + i * i % 300 for i in range(960)],
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Heavier than others, so that its memory differs from the noise."""
    sizes = {"HIDDEN": 256, "INNER": 2048, "LAYERS": 4, "HEADS": 8, "KV_HEADS": 8, "HEAD_DIM": 128}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(checkpoint, name, value)
        return checkpoint.write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[(), ("--tp-size", "2")], ids=["alone", "two ranks"])
def server(model, request, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ("--threads", "1", "--max-total-tokens", "4096", "--enable-memory-saver")
    with serving(log, "--model-path", str(model), *flags, *request.param) as running:
        yield running


def held(server: Server) -> int:
    """Memory that the engine's processes have for themselves."""
    total = 0
    for pid in (server.engine_pid(), *server.rank_pids()):
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            lines = [line.split() for line in file]
        total += next(int(line[1]) << 10 for line in lines if line[0] == "Anonymous:")
    return total


def release(server: Server, *tags: str, status: int = 200) -> str:
    answer = server.http.post("/release_memory_occupation", json={"tags": tags} if tags else {})
    assert answer.status_code == status, answer.text
    return answer.text


def resume(server: Server, *tags: str) -> None:
    answer = server.http.post("/resume_memory_occupation", json={"tags": tags} if tags else {})
    assert answer.status_code == 200, answer.text


def test_the_pages_of_the_cache_go_and_come_back_empty(server):
    first = server.generate(**PROMPT)["output_ids"]
    assert server.generate(**PROMPT)["meta_info"]["cached_tokens"] > 900
    full = held(server)
    release(server, "kv_cache")
    assert held(server) < full - CACHE_BYTES
    resume(server, "kv_cache")
    again = server.generate(**PROMPT)
    assert again["output_ids"] == first and again["meta_info"]["cached_tokens"] == 0


def test_weights_go_and_are_read_again(server):
    first = server.generate(**PROMPT)["output_ids"]
    full = held(server)
    release(server, "weights")
    assert held(server) < full - WEIGHT_BYTES
    resume(server, "weights")
    again = server.generate(**PROMPT)
    assert again["output_ids"] == first and again["meta_info"]["cached_tokens"] > 900


def test_requests_wait_until_all_memory_is_there_again(server):
    first = server.generate(**PROMPT)["output_ids"]
    release(server)
    asking = Asking(server, "The banyan sleeps", 20)
    wait_until(lambda: server.stats()["waiting"] == 1, 60, "the request")
    ready = server.http.get("/ready")
    assert ready.status_code == 503 and "kv_cache, weights" in ready.text
    resume(server, "weights")
    assert server.stats()["running"] == 0 and asking.is_alive()
    resume(server, "kv_cache")
    assert len(asking.result()["output_ids"]) == 20
    assert server.http.get("/ready").status_code == 200
    assert server.generate(**PROMPT)["output_ids"] == first


def test_what_cannot_be_released_is_refused_and_nothing_changes(server):
    running = Asking(server, "The banyan is awake", 500)
    wait_running(server, 1)
    assert "1 running" in release(server, status=400)
    pause(server, "retract")
    release(server, "kv_cache")
    assert "released already" in release(server, status=400)
    assert "got 'tables'" in release(server, "tables", status=400)
    resume(server)
    go_on(server)
    assert len(running.result()["output_ids"]) == 500


def test_memory_goes_and_comes_under_load_and_every_request_is_answered(server):
    """A release is refused while requests run; after a pause it is not, and they go on later."""
    params = PROMPT["sampling_params"]

    def body_of(number: int, count: int) -> dict:
        return {"input_ids": PROMPT["input_ids"][: 100 + 50 * number], "sampling_params": params}

    right = [server.generate(**body_of(n, 0))["output_ids"] for n in range(4)]
    with asking(server, 4, body_of) as crowd:
        for tags in (("kv_cache",), ("weights",), (), ("kv_cache", "weights")):
            crowd.wait_for(8)
            pause(server, "retract")
            release(server, *tags)
            go_on(server)
            wait_until(lambda: server.stats()["waiting"] == 4, 60, "all to wait")
            resume(server, *tags)
    assert {status for _, status, _ in crowd.answers} == {200}
    for body, _, answer in crowd.answers:
        number = (len(body["input_ids"]) - 100) // 50
        assert answer["output_ids"] == right[number]
    stats = settled(server.stats, 0)
    assert stats["leaked"] == 0 == stats["held_pages"]


def test_repeated_loads_leave_no_memory_behind(server, model):
    update = {"model_path": str(model)}
    sizes = []
    for _ in range(3):
        assert server.http.post("/update_weights_from_disk", json=update).status_code == 200
        sizes.append(held(server))
    assert sizes[2] < sizes[0] + WEIGHT_BYTES // 4


def test_without_the_flag_memory_is_kept(shared_server):
    text = release(shared_server, status=400)
    assert "--enable-memory-saver" in text
    assert shared_server.http.get("/ready").status_code == 200
