"""A profile of a running server: a file with the phases of its steps, and their ops."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.cli.main import main
from tests.system.serving import Server, serving

ASKED = {
    "input_ids": list(range(5, 45)),
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
}
LOOP = {"receive", "commit", "plan", "send"}
RUNNER = {"enter", "forward", "read out"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "2048")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TORCH_PROFILER_DIR", str(folder))
        with serving(tmp_path_factory.mktemp("log") / "log", *flags) as running:
            yield running


def post(server: Server, route: str, status: int = 200, **body: object) -> str:
    answer = server.http.post(route, json=body)
    assert answer.status_code == status, answer.text
    return answer.text


def spans_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


def test_a_profile_lies_in_the_folder_of_the_variable(server: Server, folder: Path) -> None:
    assert post(server, "/start_profile", profile_prefix="a-") == "Start profiling.\n"
    server.generate(**ASKED)
    reported = post(server, "/stop_profile")
    [path] = folder.glob("a-banyan-engine0-*.trace.json")
    assert str(path) in reported and path.stat().st_mode & 0o777 == 0o600


def test_it_tells_the_phases_of_each_step_and_its_ops(server: Server, tmp_path: Path) -> None:
    alone = server.generate(**ASKED)["output_ids"]
    post(server, "/start_profile", output_dir=str(tmp_path))
    assert server.generate(**ASKED)["output_ids"] == alone
    post(server, "/stop_profile")
    [path] = tmp_path.iterdir()
    spans = spans_of(path)
    lanes = {lane: [s for s in spans if s["tid"] == lane] for lane in ("engine", "runner", "ops")}
    assert {s["name"] for s in lanes["engine"]} == LOOP
    assert {s["name"] for s in lanes["runner"]} == RUNNER
    assert all(s["ph"] == "X" and s["dur"] >= 0 and s["ts"] >= 0 for s in spans)
    passes = [s for s in lanes["runner"] if s["name"] == "forward"]
    assert len(passes) >= 8 and {s["args"]["tokens"] for s in passes} >= {1}
    if not lanes["ops"]:
        pytest.skip("no compiled kernels here: ops are not timed")
    assert any("linear" in s["name"] for s in lanes["ops"])
    inside = [s for s in lanes["ops"] if passes[-1]["ts"] <= s["ts"]]
    assert sum(s["dur"] for s in inside) <= passes[-1]["dur"] * 1.01


def test_a_recording_ends_by_itself_after_the_steps_that_were_asked_for(
    server: Server, tmp_path: Path
) -> None:
    post(server, f"/start_profile?num_steps=3&output_dir={tmp_path}")
    server.generate(**ASKED)
    [path] = tmp_path.iterdir()
    assert "Profile of 3 steps: " in post(server, "/stop_profile")
    assert 3 <= sum(s["name"] == "forward" for s in spans_of(path)) <= 4


def test_what_cannot_be_recorded_is_refused(server: Server, tmp_path: Path) -> None:
    assert "No profile is being recorded" in post(server, "/stop_profile", 400)
    for body in (
        {"output_dir": "/dev/null/none"},
        {"profile_prefix": "../x"},
        {"num_steps": 0},
        {"num_steps": "many"},
    ):
        post(server, "/start_profile", 400, **body)
    new = tmp_path / "new" / "folder"
    post(server, "/start_profile", output_dir=str(new), num_steps="15")
    assert new.is_dir()
    assert "already" in post(server, "/start_profile", 400)
    post(server, "/stop_profile")


def test_what_a_profile_never_has_is_reported(server: Server, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path), "with_stack": True, "record_shapes": False}
    answer = server.http.post("/start_profile", json=body)
    assert answer.headers["x-banyan-warnings"] == "with_stack: a profile has phases and ops alone"
    post(server, "/stop_profile")


def test_the_command_records_for_a_while(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", server.url, "--seconds", "0.01", "--output-dir", str(tmp_path)]
    assert main(words) == 0
    [path] = tmp_path.iterdir()
    assert str(path) in capsys.readouterr().out
