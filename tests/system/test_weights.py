"""Other weights for a running server: taken whole, between steps, or not at all."""

import contextlib
import json
import shutil
import signal
import socket
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from banyan.sim.replay import check
from tests.support.crowd import asking
from tests.support.pauses import Asking, go_on, pause, wait_running
from tests.system.checkpoint import write_tiny_model
from tests.system.serving import free_port, launch, run_to_end, serving, settled, wait_until

PROMPT = "The banyan grows new roots and shares them, page by page. " * 4
PARAMS = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one model, and one of another size."""
    root = tmp_path_factory.mktemp("weights")
    found = [write_tiny_model(root / name, seed) for seed, name in enumerate(("old", "new"))]
    other = shutil.copytree(found[0], root / "other")
    config = (
        (other / "config.json")
        .read_text()
        .replace('"num_hidden_layers": 2', '"num_hidden_layers": 1')
    )
    (other / "config.json").write_text(config)
    return [*found, other]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    @contextlib.contextmanager
    def serve(folder, *more):
        log = tmp_path_factory.mktemp("log") / "server.log"
        flags = ("--threads", "1", "--max-total-tokens", "16384", *more)
        with serving(log, "--model-path", str(folder), *flags) as server:
            yield server

    return serve


@pytest.fixture(scope="module")
def server(start, folders):
    with start(folders[0]) as running:
        yield running


@pytest.fixture(scope="module")
def expected(start, folders):
    """What the new weights say from the start."""
    with start(folders[1]) as fresh:
        return fresh.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"]


def update(server, folder, **fields):
    return server.http.post("/update_weights_from_disk", json={"model_path": str(folder), **fields})


def test_the_answers_are_those_of_the_new_weights_and_nothing_old_is_cached(
    server, folders, expected
):
    before = server.generate(text=PROMPT, sampling_params=PARAMS)
    assert before["output_ids"] != expected
    cached = server.generate(text=PROMPT, sampling_params=PARAMS)["meta_info"]["cached_tokens"]
    assert cached > 0
    answer = update(server, folders[1], weight_version="7")
    assert answer.status_code == 200 and answer.json()["success"], answer.text
    after = server.generate(text=PROMPT, sampling_params=PARAMS)
    assert after["output_ids"] == expected
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["weight_version"] == "7"
    assert server.http.get("/weight_version").json()["weight_version"] == "7"
    assert update(server, folders[0]).status_code == 200
    again = server.generate(text=PROMPT, sampling_params=PARAMS)
    assert again["output_ids"] == before["output_ids"]


def test_weights_that_do_not_fit_change_nothing(server, folders):
    before = server.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"]
    for folder, text in ((folders[2], "num_layers differ"), ("/nowhere", "no model at")):
        answer = update(server, folder)
        assert answer.status_code == 400 and not answer.json()["success"]
        assert text in answer.json()["message"]
    assert server.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"] == before


def test_requests_that_run_are_not_given_other_weights_unasked(server, folders):
    running = Asking(server, "The banyan waits")
    wait_running(server, 1)
    refused = update(server, folders[0])
    assert refused.status_code == 400 and "1 running" in refused.json()["message"]
    assert update(server, folders[0], abort_all_requests=True).status_code == 200
    assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_paused_request_goes_on_with_the_new_weights(server, folders):
    running = Asking(server, "The banyan goes on")
    wait_running(server, 1)
    pause(server, "in_place")
    held = update(server, folders[1])
    assert held.status_code == 400 and "hold pages" in held.json()["message"]
    pause(server, "retract")
    wait_until(lambda: server.stats()["waiting"] == 1, 60, "the request to be retracted")
    answer = update(server, folders[1]).json()
    assert answer["success"] and answer["num_paused_requests"] == 1
    go_on(server)
    assert len(running.result()["output_ids"]) == 1800
    assert update(server, folders[0]).status_code == 200


def test_under_load_each_answer_is_of_the_one_version_that_it_names(server, folders):
    """The weights change, and are refused, while clients ask all the time."""

    def body_of(number: int, count: int) -> dict:
        text = PROMPT[: 40 * (1 + (number + count) % 3)]
        return {"text": text, "sampling_params": PARAMS | {"max_new_tokens": 8 + 60 * (number % 2)}}

    with asking(server, 6, body_of) as crowd:
        for turn in range(6):
            new, name = folders[turn % 2], ("old", "new")[turn % 2]
            taken = update(server, new, abort_all_requests=True, weight_version=name)
            assert taken.status_code == 200, taken.text
            crowd.wait_for(12)
            assert update(server, folders[2]).status_code == 400
    assert {status for _, status, _ in crowd.answers} == {200}
    found: dict[tuple[str, str, int], list[int]] = {}
    for body, _, answer in crowd.answers:
        meta = answer["meta_info"]
        version, length = meta["weight_version"], body["sampling_params"]["max_new_tokens"]
        if version != "default" and meta["finish_reason"]["type"] == "length":
            of_version = found.setdefault((version, body["text"], length), answer["output_ids"])
            assert of_version == answer["output_ids"], (version, length)
    assert len(found) > 8
    assert all(found["old", *key] != found.get(("new", *key)) for v, *key in found if v == "old")
    stats = settled(server.stats, 0)
    assert stats["leaked"] == 0 == stats["held_pages"]
    assert update(server, folders[0]).status_code == 200


@pytest.mark.parametrize("fields", [{"manifest": {"a": 1}}, {"load_format": "pt"}])
def test_what_an_update_cannot_honour_is_refused(server, folders, fields):
    answer = update(server, folders[0], **fields)
    assert answer.status_code == 400 and next(iter(fields)) in answer.json()["message"]


def test_all_ranks_take_the_weights_or_none_does(start, folders, expected, tmp_path):
    """In two stages: what one layer lacks only one rank can know."""
    lame = shutil.copytree(folders[1], tmp_path / "lame")
    tensors = load_file(lame / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, lame / "model.safetensors", metadata={"format": "pt"})
    with start(folders[0], "--pp-size", "2") as server:
        before = server.generate(text=PROMPT, sampling_params=PARAMS)
        answer = update(server, lame)
        assert answer.status_code == 400 and "rank 1: the checkpoint lacks" in answer.text
        again = server.generate(text=PROMPT, sampling_params=PARAMS)
        assert again["output_ids"] == before["output_ids"] != expected
        assert again["meta_info"]["cached_tokens"] > 0
        assert update(server, folders[1]).status_code == 200
        assert server.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"] == expected


def test_ranks_that_share_layers_answer_with_the_new_weights(start, folders, expected, tmp_path):
    journal = tmp_path / "journal"
    with start(folders[0], "--tp-size", "2", "--journal", str(journal)) as server:
        before = server.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"]
        assert update(server, folders[1], flush_cache=False).status_code == 200
        after = server.generate(text=PROMPT, sampling_params=PARAMS)
        assert after["output_ids"] == expected != before
        assert after["meta_info"]["cached_tokens"] == 0
        server.http.post("/start_profile", json={"output_dir": str(tmp_path)})
        server.generate(text=PROMPT, sampling_params=PARAMS)
        reported = server.http.post("/stop_profile").text
    names = sorted(tmp_path.glob("banyan-engine0-*.trace.json"))
    ranks = [json.loads(path.read_text())["traceEvents"] for path in names]
    assert [len({span["pid"] for span in spans}) for spans in ranks] == [1, 1]
    assert all(str(path) in reported for path in names)
    assert all(any(span["name"] == "forward" for span in spans) for spans in ranks)
    report = check(str(journal))
    assert report.ok and report.plans > 40, str(report)


def weight(server, name, status=200, **fields):
    answer = server.http.post("/get_weights_by_name", json={"name": name, **fields})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.text


def test_a_tensor_is_returned_as_it_was_taken(server, folders, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    for folder in (folders[1], folders[0]):
        assert update(server, folder).status_code == 200
        tensors = load_file(folder / "model.safetensors")
        assert weight(server, name, truncate_size=3) == tensors[name][:3].tolist()
    assert weight(server, "model.norm.weight") == tensors["model.norm.weight"][:100].tolist()
    params = {"name": name, "truncate_size": "1"}
    assert len(server.http.get("/get_weights_by_name", params=params).json()) == 1
    assert f"near are: {name}" in weight(server, name.replace("down", "dwn"), 400).replace("N", "n")
    for wrong in (0, "many", -1):
        weight(server, name, 400, truncate_size=wrong)


def test_a_tensor_of_files_that_have_changed_is_not_returned(server, folders, tmp_path):
    moving = shutil.copytree(folders[1], tmp_path / "moving")
    assert update(server, moving).status_code == 200
    shutil.copy(folders[0] / "model.safetensors", moving)
    assert "not those" in weight(server, "model.norm.weight", 400)
    assert update(server, folders[0]).status_code == 200


@pytest.mark.parametrize(
    "route", ["update_weights_from_tensor", "update_weights_from_ipc", "init_weights_update_group"]
)
def test_weights_that_do_not_come_from_files_are_refused_with_what_to_do(server, route):
    answer = server.http.post(f"/{route}", json={"serialized_named_tensors": ["gASVAA=="]})
    assert answer.status_code == 501 and "/update_weights_from_disk" in answer.text


def test_all_replicas_do_it_or_none_does(start, folders, expected):
    """One of two is busy: the other must not go ahead, and nobody's requests may wait for ever."""
    with start(folders[0], "--dp-size", "2", "--enable-memory-saver") as server:
        before = [
            server.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"] for _ in range(2)
        ]
        running = [Asking(server, "The banyan is busy")]
        wait_running(server, 1)
        assert "1 running" in update(server, folders[1]).json()["message"]
        released = server.http.post("/release_memory_occupation")
        assert released.status_code == 400 and "1 running" in released.text
        again = [
            server.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"] for _ in range(4)
        ]
        assert again == before * 2 and before[0] == before[1] != expected
        assert len(running[0].result()["output_ids"]) == 1800
        assert update(server, folders[1]).status_code == 200
        for _ in range(4):
            assert server.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"] == expected
        for route in ("release", "resume"):
            assert server.http.post(f"/{route}_memory_occupation").status_code == 200
        for _ in range(2):
            assert server.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"] == expected
        assert server.http.get("/ready").status_code == 200


def test_a_server_waits_for_the_weights_that_are_to_come(tmp_path, folders, expected):
    waits = ("--load-format", "dummy", "--checkpoint-engine-wait-weights-before-ready")
    flags = ("--model-path", str(folders[0]), "--threads", "1", "--max-total-tokens", "16384")
    server = launch(tmp_path / "log", *flags, *waits)
    body = {"text": PROMPT, "sampling_params": PARAMS}
    try:
        wait_until(lambda: "weights have not been sent" in reason(server), 60, "the engine")
        for answer in (
            server.http.get("/health"),
            server.http.post("/generate", json=body),
            server.http.get("/health_generate"),
        ):
            assert answer.status_code == 503 and "weights have not been sent" in answer.text
        assert update(server, folders[1]).status_code == 200
        assert server.http.get("/readyz").status_code == 200
        assert server.generate(**body)["output_ids"] == expected
    finally:
        server.kill()


def reason(server):
    """Why the server is not ready; "" while nobody answers."""
    with contextlib.suppress(httpx.TransportError):
        return server.http.get("/readyz").text
    return ""


@pytest.mark.parametrize("backend", ["nccl", "transfer_engine"])
def test_a_new_server_takes_its_weights_from_a_running_one(tmp_path, folders, expected, backend):
    """In its folder are no weights; ports are opened once, for whom the seed has named them."""
    bare, newer = tmp_path / "bare", shutil.copytree(folders[1], tmp_path / "newer")
    shutil.copytree(newer, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    name = "--remote-instance-weight-loader-"
    sends = [f"{name}start-seed-via-transfer-engine"] if backend == "transfer_engine" else []
    flags = ("--threads", "1", "--max-total-tokens", "16384")
    model = ("--model-path", str(folders[0]), "--weight-version", "7")
    with serving(tmp_path / "seed.log", *model, *flags, *sends) as seed:
        assert update(seed, newer).status_code == 200
        ports = [str(free_port()) for _ in range(3)]
        taken = [
            *("--model-path", str(bare), "--load-format", "remote_instance"),
            *(f"{name}seed-instance-ip", "127.0.0.1", f"{name}backend", backend),
            *(f"{name}seed-instance-service-port", str(seed.http.base_url.port)),
            *((f"{name}send-weights-group-ports", *ports) if backend == "nccl" else ()),
        ]
        with serving(tmp_path / "log", *taken, *flags) as server:
            found = server.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"]
            assert found == expected
            server.signal(signal.SIGTERM)
            assert server.exit_code(60.0) == 0
            assert not list(Path("/dev/shm").glob(f"banyan-weights-{server.pid}-*"))
        lines = (tmp_path / "log").read_text()
        count = 3 if backend == "nccl" else 4
        assert f"files=1 connections={count} came from" in lines and "version 7" in lines
        for port in ports:
            with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(port))):
                pass
        assert seed.generate(text=PROMPT, sampling_params=PARAMS)["output_ids"] == expected
        (weights,) = newer.glob("*.safetensors")
        weights.write_bytes(weights.read_bytes())  # at another time, so perhaps another content
        code, text, _ = run_to_end(tmp_path / "refused", *taken, *flags, timeout_s=60)
    assert code == 2 and "are not those that the weights were read from" in text
