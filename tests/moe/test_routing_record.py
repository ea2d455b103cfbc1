"""What is kept of the choices of experts, against plain counts of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from banyan.base.errors import RequestError
from banyan.config.schema import ExpertsConfig
from banyan.formats.arrays import read_arrays
from banyan.messages.control_ops import RecordExperts
from banyan.moe.expert_watch import ExpertWatch
from banyan.moe.routing_record import ExpertLayers, ExpertRecord, refuse_to_record
from tests.support.experts import config_with

PLACES = ExpertLayers(count=6, per_token=2, layers=4, sparse=(1, 2, 3))


def passes(number: int, tokens: int = 5, seed: int = 0) -> list[np.ndarray]:
    """Choices [layers with experts, tokens, per_token] of some passes, without repetition."""
    random = np.random.default_rng(seed)
    return [
        np.array([[random.permutation(6)[:2] for _ in range(tokens)] for _ in PLACES.sparse])
        for _ in range(number)
    ]


def record_of(mode: str, folder: str, shares: int = 1, **more: object) -> ExpertRecord:
    config = ExpertsConfig(recorder=mode, folder=folder, **more)  # type: ignore[arg-type]
    return ExpertRecord(config, PLACES, shares, report_every=2)


def record_by(*flags: str, folder: str, shares: int = 1) -> ExpertRecord:
    config = config_with("--expert-distribution-recorder-mode", "stat", *flags).experts
    return ExpertRecord(replace(config, folder=folder), PLACES, shares, report_every=2)


def order(record: ExpertRecord, what: str) -> str:
    return record.prepare(RecordExperts(what, 7))().text


def run(record: ExpertRecord, chosen: list[np.ndarray]) -> None:
    for each in chosen:
        record.ran(each.astype(np.int32), np.arange(each.shape[1]))


def counted(chosen: list[np.ndarray]) -> np.ndarray:
    found = np.zeros((PLACES.layers, PLACES.count), np.int64)
    for each in chosen:
        for at, layer in enumerate(PLACES.sparse):
            for expert in each[at].ravel():
                found[layer, expert] += 1
    return found


def dumped(record: ExpertRecord, tmp_path) -> dict[str, np.ndarray]:
    reported = order(record, "dump")
    path = tmp_path / "expert_distribution_recorder_engine0_7.safetensors"
    assert str(path) in reported and path.stat().st_mode & 0o777 == 0o600
    return read_arrays(str(path))


@pytest.mark.parametrize("mode", ["stat", "stat_approx"])
@pytest.mark.parametrize("buffer", [0, -1])
def test_sums_are_those_between_start_and_stop(mode, buffer, tmp_path):
    record, chosen = record_of(mode, str(tmp_path), buffer=buffer), passes(4)
    run(record, passes(2, seed=1))
    order(record, "start")
    run(record, chosen)
    order(record, "stop")
    run(record, passes(2, seed=2))

    found = dumped(record, tmp_path)

    assert np.array_equal(found["logical_count"], counted(chosen))
    with pytest.raises(RequestError, match="No pass has been recorded"):
        order(record, "dump")


def test_each_pass_is_kept_by_itself(tmp_path):
    record, chosen = record_of("per_pass", str(tmp_path)), [*passes(2), *passes(1, tokens=1)]
    order(record, "start")
    run(record, chosen)

    found = dumped(record, tmp_path)["logical_count_of_pass"]

    assert np.array_equal(found, np.stack([counted([each]) for each in chosen]))


def test_each_token_is_kept_by_itself(tmp_path):
    record, chosen = record_of("per_token", str(tmp_path)), [*passes(2), *passes(1, tokens=1)]
    order(record, "start")
    run(record, chosen)

    found = dumped(record, tmp_path)

    assert found["tokens_of_pass"].tolist() == [5, 5, 1]
    assert found["layers"].tolist() == [1, 2, 3]
    assert found["positions"].tolist() == [*range(5), *range(5), 0]
    assert np.array_equal(found["topk_ids"], np.concatenate([c.swapaxes(0, 1) for c in chosen]))


def test_the_buffer_keeps_the_latest_passes(tmp_path):
    size = ("--expert-distribution-recorder-buffer-size", "2")
    record, chosen = record_by(*size, folder=str(tmp_path)), passes(5)
    order(record, "start")
    run(record, chosen)

    assert np.array_equal(dumped(record, tmp_path)["logical_count"], counted(chosen[-2:]))


def test_a_line_says_how_evenly_experts_are_chosen(tmp_path, caplog):
    flag = "--enable-expert-distribution-metrics"
    record = record_by(flag, folder=str(tmp_path), shares=3)
    even = np.array([[[0, 2], [4, 1], [3, 5]]] * 3)
    one_sided = np.array([[[0, 1], [0, 1], [0, 1]]] * 3)
    with caplog.at_level("INFO", "banyan"):
        run(record, [even, one_sided])

    [line] = [r.getMessage() for r in caplog.records if "balancedness" in r.getMessage()]
    assert line == "expert balancedness=0.667 passes=2 lowest=0.333"


def test_what_was_not_started_cannot_be_stopped(tmp_path):
    with pytest.raises(RequestError, match="start_expert_distribution_record"):
        order(record_of("stat", str(tmp_path)), "stop")


def test_a_folder_that_is_gone_is_named(tmp_path):
    record = record_of("stat", str(tmp_path / "gone"))
    order(record, "start")
    run(record, passes(1))
    with pytest.raises(RequestError, match="gone.*is not a folder"):
        order(record, "dump")


class Recorder:
    is_recording = False


def test_a_step_is_read_where_it_ran():
    """Of recorded steps the memory that they fill, of others what their ops gave."""
    recorder, seen = Recorder(), []
    watch = ExpertWatch(recorder)  # type: ignore[arg-type]
    watch.local_observers.append(
        lambda chosen, positions: seen.append((chosen.tolist(), len(positions)))
    )
    recorder.is_recording, filled = True, torch.zeros(4, 2, dtype=torch.int64)
    watch.chose(1, filled)
    recorder.is_recording = False

    filled[:2] = torch.tensor([[3, 1], [0, 2]])
    watch.ran(np.arange(2))
    watch.chose(1, torch.tensor([[5, 4]]))
    watch.ran(np.arange(1))
    filled[:1] = torch.tensor([[1, 0]])
    watch.ran(np.arange(1))

    assert seen == [([[[3, 1], [0, 2]]], 2), ([[[5, 4]]], 1), ([[[1, 0]]], 1)]


def test_without_a_mode_a_record_is_refused_by_name():
    with pytest.raises(RequestError, match="--expert-distribution-recorder-mode"):
        refuse_to_record(RecordExperts("start"))
