"""The comparison's own arithmetic: ratios, spreads, divergence, and the page it writes."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import peer_report
from benchmarks.compare_peers import Contest, remember
from benchmarks.fidelity import divergence, read_scores
from benchmarks.machine import PeerError
from benchmarks.peers import (
    MODELS,
    PEERS,
    Place,
    llama_instructions,
    peer_held_to,
    write_tile_shapes_whole,
)
from benchmarks.workloads import WORKLOADS, shortened


def run(peer: str, number: int, output: float, ttft: float, workload: str = "c8") -> dict:
    return {
        "peer": peer, "workload": workload, "round": number, "failed": 0,
        "figures": {"output": output, "TTFT p50": ttft, "TTFT p99": ttft * 2},
        "machine_read_gb_s": 10.0 + number, "machine_fp32_gflop_s": 50.0,
    }  # fmt: skip


def contest() -> Contest:
    found = Contest("smollm2", skipped={"vllm": "it ended with code 1"})
    for number, (ours, theirs) in enumerate([(300.0, 100.0), (400.0, 100.0), (500.0, 125.0)]):
        found.runs += [
            run("banyan", number, ours, 10.0),
            run("llamacpp", number, theirs, 30.0),
            run("openvino", number, theirs / 2, 20.0),
            run("banyan", number, ours * 0.6, 10.0, "busy"),
            run("llamacpp", number, theirs * 0.25, 10.0, "busy"),
        ]
    found.starts = {"banyan": 1.2, "llamacpp": 2.1, "openvino": 5.0}
    found.memory_mib = {"banyan": 400.0, "llamacpp": 1500.0, "openvino": 390.0}
    found.fidelity = {
        "banyan": {"kl_mean": 0.001, "kl_p99": 0.01, "top1": 1.0},
        "llamacpp": {"error": "x"},
    }
    return found


def line(report: dict, workload: str, figure: str) -> dict:
    lines = report["models"][0]["lines"]
    return next(x for x in lines if (x["workload"], x["figure"]) == (workload, figure))


def test_ratios_are_taken_round_by_round_against_the_best_peer() -> None:
    found = line(peer_report.as_json([contest()], 3, 1.0), "c8", "output")
    assert found["best_peer"] == "llamacpp"
    assert found["engines"]["banyan"] == {"median": 400.0, "least": 300.0, "most": 500.0}
    assert found["ratio"] == {"median": 4.0, "least": 3.0, "most": 4.0}
    assert found["machine_read_gb_s"] == 11.0


def test_where_less_is_better_a_ratio_above_one_is_still_ours() -> None:
    found = line(peer_report.as_json([contest()], 3, 1.0), "c8", "TTFT p50")
    assert found["best_peer"] == "openvino"
    assert found["ratio"]["median"] == 2.0


def test_the_page_shows_figures_skipped_peers_and_what_a_busy_core_costs(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{peer_report.BEGIN}\nold\n{peer_report.END}\nafter\n")
    peer_report.put_between_marks(
        page, peer_report.as_markdown(peer_report.as_json([contest()], 3, 1.0))
    )
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 400 [300–500] | 100 [100–125] | 50.0 [50.0–62.5] |" in text
    assert "4 [3–4] (llama.cpp)" in text
    assert "kept with one core taken | share of quiet | 0.6 | 0.25 |" in text
    assert "- vLLM CPU: it ended with code 1" in text
    assert "KL to fp32 | nats | 0.001 | – |" in text


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("nothing here")
    with pytest.raises(SystemExit, match="has no lines"):
        peer_report.put_between_marks(page, "x")
    assert page.read_text() == "nothing here"


def test_divergence_of_a_distribution_from_itself_is_nothing() -> None:
    expected = np.log(np.array([0.5, 0.3, 0.2]))
    assert divergence(expected, {0: np.log(0.5), 1: np.log(0.3)}) == pytest.approx(0.0, abs=1e-9)


def test_divergence_over_all_tokens_is_the_definition_and_over_some_a_lower_bound() -> None:
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.4, 0.1, 0.1])
    true = float((p * np.log(p / q)).sum())
    everything = {i: float(np.log(x)) for i, x in enumerate(q)}
    assert divergence(np.log(p), everything) == pytest.approx(true, abs=1e-6)
    some = {i: everything[i] for i in (0, 1)}
    assert 0 < divergence(np.log(p), some) <= true


def test_scores_are_read_from_both_forms() -> None:
    listed = {"content": [{"top_logprobs": [{"id": 7, "logprob": -0.5}]}]}
    named = {"top_logprobs": [{"token_id:7": -0.5}]}
    assert read_scores(listed) == read_scores(named) == {7: -0.5}


def test_a_shortened_workload_keeps_its_shape() -> None:
    small = shortened(WORKLOADS["c32"], 0.01).options
    assert (small.num_prompts, small.max_concurrency, small.random_input_len) == (32, 32, 128)
    assert small.random_output_len == 2
    assert shortened(WORKLOADS["prefill"], 0.01).options.random_output_len == 1


def test_a_shortened_run_names_the_answers_that_it_asked_for() -> None:
    small, whole = (
        peer_report.as_markdown(peer_report.as_json([contest()], 3, n)) for n in (0.25, 1.0)
    )
    assert "8 at once, 128 in, 32 out" in small and "128 out" not in small
    assert "8 at once, 128 in, 128 out" in whole
    assert shortened(WORKLOADS["prefix"], 0.25).shown.endswith("own), 8 out")


def test_a_source_that_no_registry_has_is_asked_for_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="ik_llama.cpp into .*ik_llama/src"):
        PEERS["ik_llama"].setup(Place(tmp_path))


TILES = """inline void ggml_tile_config_init(void) {
    tc.rows[0] = 8;   tc.colsb[0] = 64;
    _tile_loadconfig(&tc);
    done = true;
}
"""


def test_the_shape_of_tiles_is_written_before_it_is_loaded_and_once(tmp_path: Path) -> None:
    source = tmp_path / "mmq.cpp"
    source.write_text(TILES)
    for _ in range(2):
        write_tile_shapes_whole(source)
        before, load, _ = source.read_text().partition("    _tile_loadconfig(&tc);")
        assert load and before.endswith('64;\n    __asm__ volatile("" : : "r"(&tc) : "memory");\n')
        assert before.count("__asm__") == 1


def test_a_source_without_the_line_that_loads_tiles_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "mmq.cpp"
    source.write_text(TILES.replace("&tc", "&shape"))
    with pytest.raises(PeerError, match="mmq.cpp does not have one line '_tile_loadconfig"):
        write_tile_shapes_whole(source)


def test_llama_is_built_for_this_cpu_or_for_what_our_avx2_kernels_use() -> None:
    assert llama_instructions("") == ["-DGGML_NATIVE=ON"]
    off, *on = llama_instructions("avx2")
    assert off == "-DGGML_NATIVE=OFF"
    named = {each.removeprefix("-DGGML_").removesuffix("=ON").lower() for each in on}
    assert named == {"sse42", "avx", "avx2", "fma", "f16c", "bmi2"}


def test_engines_held_to_avx2_are_other_programs_and_who_cannot_be_held_is_reported() -> None:
    place, model = Place(Path("peers")), MODELS["smollm2"]
    ours, theirs = (
        peer_held_to("avx2", name).command(place, model, 1).words for name in ("banyan", "llamacpp")
    )
    assert ours[-2:] == ["--cpu-isa", "avx2"]
    assert theirs[0] == "peers/llamacpp/build-avx2/bin/llama-server"
    free = peer_held_to("", "llamacpp").command(place, model, 1).words
    assert free[0] == "peers/llamacpp/build/bin/llama-server" and free[1:] == theirs[1:]
    with pytest.raises(PeerError, match="nothing holds it to avx2"):
        peer_held_to("avx2", "openvino")


def test_a_run_of_engines_that_are_held_says_so() -> None:
    held = peer_report.as_markdown(peer_report.as_json([contest()], 3, 1.0, "avx2"))
    assert "All engines held to avx2." in held
    assert "held" not in peer_report.as_markdown(peer_report.as_json([contest()], 3, 1.0))


def test_a_shortened_run_says_that_it_is_no_result() -> None:
    assert "not a result" in peer_report.as_markdown(peer_report.as_json([contest()], 3, 0.1))
    assert "not a result" not in peer_report.as_markdown(peer_report.as_json([contest()], 3, 1.0))


def report(faster: float = 1.0) -> dict:
    found = contest()
    for run in found.runs:
        run["figures"]["output"] *= faster
    return peer_report.as_json([found], 3, 1.0)


def test_a_run_is_one_line_with_commit_machine_probes_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "history.jsonl"
    peer_report.keep(path, peer_report.entry(report(), "abc123+"))
    peer_report.keep(path, peer_report.entry(report(), "def456"))
    first, second = path.read_text().splitlines()
    found = peer_report.last_like(path, peer_report.entry(report(), "now"))
    assert found["commit"] == "def456" and "abc123+" in first and "def456" in second
    (output,) = [
        each for each in found["figures"] if (each["workload"], each["figure"]) == ("c8", "output")
    ]
    assert output["engines"] == {"banyan": 400.0, "llamacpp": 100.0, "openvino": 50.0}
    assert (output["read_gb_s"], output["fp32_gflop_s"]) == (11.0, 50.0)
    assert found["machine"]["cores"] > 0


def test_a_slower_run_says_so_with_the_machine_of_both() -> None:
    before, now = peer_report.entry(report(), "abc123"), peer_report.entry(report(0.8), "def456")
    (change,) = [each for each in peer_report.changes(before, now) if "c8 output" in each]
    assert change.startswith("SLOWER: smollm2 c8 output 320.0 tokens/s, 400.0 at abc123; ")
    assert change.endswith("read 11.0 GB/s, 11.0 then, fp32 50 GFLOP/s, 50 then")


def test_noise_is_no_news_and_more_is_faster() -> None:
    before = peer_report.entry(report(), "abc123")
    assert list(peer_report.changes(before, peer_report.entry(report(1.02), "def456"))) == []
    (change,) = [
        e for e in peer_report.changes(before, peer_report.entry(report(1.5), "d")) if "c8 o" in e
    ]
    assert change.startswith("faster: ")


def test_runs_of_other_machines_or_shares_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    path, now = tmp_path / "history.jsonl", peer_report.entry(report(), "now")
    assert peer_report.last_like(path, now) == {}
    peer_report.keep(path, peer_report.entry(report(), "mine"))
    peer_report.keep(path, peer_report.entry(report(), "other") | {"machine": {"cpu": "other"}})
    peer_report.keep(path, peer_report.entry(report(), "short") | {"share": 0.25})
    peer_report.keep(path, peer_report.entry(report(), "held") | {"cpu_isa": "avx2"})
    with path.open("a") as file:
        file.write('{"commit": "torn\n')
    assert peer_report.last_like(path, now)["commit"] == "mine"


def test_a_comparison_adds_its_line_and_tells_what_has_changed(tmp_path: Path, capsys) -> None:
    path = tmp_path / "history.jsonl"
    remember(path, report())
    assert "SLOWER" not in capsys.readouterr().err
    remember(path, report(0.5))
    assert "SLOWER: smollm2 c8 output" in capsys.readouterr().err
    assert len(path.read_text().splitlines()) == 2
