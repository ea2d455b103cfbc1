"""The history of comparisons: what a run adds to it, and what a slower one says."""

from pathlib import Path

from benchmarks import history, tables
from benchmarks.compare_peers import remember
from tests.bench.test_peers import contest


def report(faster: float = 1.0) -> dict:
    found = contest()
    for run in found.runs:
        run["figures"]["output"] *= faster
    return tables.as_json([found], 3, 1.0)


def test_a_run_is_one_line_with_commit_machine_probes_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "history.jsonl"
    history.keep(path, history.entry(report(), "abc123+"))
    history.keep(path, history.entry(report(), "def456"))
    first, second = path.read_text().splitlines()
    found = history.last_like(path, history.entry(report(), "now"))
    assert found["commit"] == "def456" and "abc123+" in first and "def456" in second
    (output,) = [
        each for each in found["figures"] if (each["workload"], each["figure"]) == ("c8", "output")
    ]
    assert output["engines"] == {"banyan": 400.0, "llamacpp": 100.0, "openvino": 50.0}
    assert (output["read_gb_s"], output["fp32_gflop_s"]) == (11.0, 50.0)
    assert found["machine"]["cores"] > 0


def test_a_slower_run_says_so_with_the_machine_of_both() -> None:
    before, now = history.entry(report(), "abc123"), history.entry(report(0.8), "def456")
    (told,) = [each for each in history.changes(before, now) if "c8 output" in each]
    assert told.startswith("SLOWER: smollm2 c8 output 320.0 tokens/s, 400.0 at abc123; ")
    assert told.endswith("read 11.0 GB/s, 11.0 then, fp32 50 GFLOP/s, 50 then")


def test_noise_is_no_news_and_more_is_faster() -> None:
    before = history.entry(report(), "abc123")
    assert list(history.changes(before, history.entry(report(1.02), "def456"))) == []
    (told,) = [e for e in history.changes(before, history.entry(report(1.5), "d")) if "c8 o" in e]
    assert told.startswith("faster: ")


def test_runs_of_other_machines_or_shares_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    path, now = tmp_path / "history.jsonl", history.entry(report(), "now")
    assert history.last_like(path, now) == {}
    history.keep(path, history.entry(report(), "mine"))
    history.keep(path, history.entry(report(), "other") | {"machine": {"cpu": "other"}})
    history.keep(path, history.entry(report(), "short") | {"share": 0.25})
    history.keep(path, history.entry(report(), "held") | {"cpu_isa": "avx2"})
    with path.open("a") as file:
        file.write('{"commit": "torn\n')
    assert history.last_like(path, now)["commit"] == "mine"


def test_a_comparison_adds_its_line_and_tells_what_has_changed(tmp_path: Path, capsys) -> None:
    path = tmp_path / "history.jsonl"
    remember(path, report())
    assert "SLOWER" not in capsys.readouterr().err
    remember(path, report(0.5))
    assert "SLOWER: smollm2 c8 output" in capsys.readouterr().err
    assert len(path.read_text().splitlines()) == 2
