"""Results of a comparison: medians, ratios with their spread, JSON, Markdown and a history file.

The history file has one line of JSON per run: commit, time, machine, measured machine speed and the
figures. Banyan's figures are compared with the last run on the same machine.
"""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers import PEERS
from benchmarks.workloads import HIGH, WORKLOADS, Figure, shortened

OURS = "banyan"
_CHANGE = 0.05
"""Relative changes below this are noise."""
_MOST_BYTES = 64 << 20
"""Largest history file that is read."""
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_NAMES = {
    "banyan": "Banyan",
    "llamacpp": "llama.cpp",
    "ik_llama": "ik_llama.cpp",
    "vllm": "vLLM CPU",
    "openvino": "OpenVINO GenAI",
    "transformers": "transformers",
}


def as_json(contests: Sequence[object], rounds: int, share: float, cpu_isa: str = "") -> dict:
    """Everything that was measured, with the medians next to it.

    Args:
        share: of each workload that was run; below 1 the figures are no results.
        cpu_isa: what all engines were held to, "" for what each chose.
    """
    models = [asdict(contest) for contest in contests]  # type: ignore[call-overload]
    for model in models:
        model["lines"] = [
            line
            for workload in WORKLOADS.values()
            for figure in workload.figures
            if (line := _line(model["runs"], workload.name, figure))
        ]
    machine = _machine()
    return {"machine": machine, "rounds": rounds, "share": share, "cpu_isa": cpu_isa,
            "models": models}  # fmt: skip


def _line(runs: Sequence[dict], workload: str, figure: Figure) -> dict:
    """Median, least and most of every engine; the ratios of each round to the best peer."""
    values: dict[str, dict[int, float]] = {}
    mine = [r for r in runs if r["workload"] == workload and figure.name in r.get("figures", {})]
    for run in mine:
        values.setdefault(run["peer"], {})[run["round"]] = run["figures"][figure.name]
    if not values:
        return {}
    spreads = {peer: _spread(list(found.values())) for peer, found in values.items()}
    line = {
        "workload": workload,
        "figure": figure.name,
        "unit": figure.unit,
        "better": figure.better,
        "engines": spreads,
        "machine_read_gb_s": statistics.median(r["machine_read_gb_s"] for r in mine),
        "machine_fp32_gflop_s": statistics.median(r["machine_fp32_gflop_s"] for r in mine),
    }
    peers = [peer for peer in values if peer != OURS]
    if OURS in values and peers:
        best = (max if figure.better == HIGH else min)(peers, key=lambda p: spreads[p]["median"])
        line["best_peer"] = best
        line["ratio"] = _spread(_ratios(values[OURS], values[best], figure))
    return line


def _ratios(ours: Mapping[int, float], theirs: Mapping[int, float], figure: Figure) -> list[float]:
    """Of rounds that both finished; above 1 = Banyan is better."""
    pairs = [(ours[r], theirs[r]) for r in ours if r in theirs]
    return [o / t if figure.better == HIGH else t / o for o, t in pairs]


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def as_markdown(report: Mapping) -> str:
    machine = report["machine"]
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}. Medians [least–most] of "
        f"{report['rounds']} rounds."
    ]
    if report["share"] < 1:
        parts.append(f"**Shortened to {report['share']:g} of each workload: not a result.**")
    if report["cpu_isa"]:
        parts.append(f"All engines held to {report['cpu_isa']}.")
    parts += [_model_table(model, report["share"]) for model in report["models"]]
    return "\n\n".join(parts)


def _model_table(model: Mapping, share: float) -> str:
    engines = [p for p in PEERS if any(p in line["engines"] for line in model["lines"])]
    head = ["workload", "figure", *(_NAMES[e] for e in engines)]
    head += ["Banyan / best peer", "read GB/s", "fp32 GFLOP/s"]
    rows = [_row(line, engines, share) for line in model["lines"]]
    rows += _other_rows(model, engines)
    table = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    parts = [f"### {model['model']}", "\n".join(table)]
    skipped = [f"- {_NAMES.get(p, p)}: {why}" for p, why in model["skipped"].items()]
    if skipped:
        parts.append("Left out:\n\n" + "\n".join(skipped))
    failed = [r for r in model["runs"] if r.get("failed") or r.get("error")]
    if failed:
        shown = sorted({f"- {r['workload']} on {_NAMES[r['peer']]}: {_why(r)}" for r in failed})
        parts.append("Failed requests:\n\n" + "\n".join(shown))
    return "\n\n".join(parts)


def _row(line: Mapping, engines: Sequence[str], share: float) -> list[str]:
    cells = [
        shortened(WORKLOADS[line["workload"]], share).shown,
        f"{line['figure']}, {line['unit']}",
    ]
    cells += [_cell(line["engines"].get(engine)) for engine in engines]
    ratio = line.get("ratio")
    cells.append(f"{_cell(ratio)} ({_NAMES[line['best_peer']]})" if ratio else "–")
    return [*cells, f"{line['machine_read_gb_s']:.1f}", f"{line['machine_fp32_gflop_s']:.0f}"]


def _other_rows(model: Mapping, engines: Sequence[str]) -> list[list[str]]:
    """What is measured once: start, memory, fidelity; and what the foreign process cost."""

    def cells(what: str, unit: str, values: Mapping[str, float | None]) -> list[str]:
        shown = [_short(values.get(engine)) for engine in engines]
        return [what, unit, *shown, "–", "–", "–"]

    rows = [
        cells("start to first answer", "s", model["starts"]),
        cells("memory of all processes", "PSS, MiB", model["memory_mib"]),
    ]
    kept = _kept_when_busy(model)
    if kept:
        rows.append(cells("kept with one core taken", "share of quiet", kept))
    exact = {e: f for e, f in model["fidelity"].items() if "error" not in f}
    if exact:
        rows.append(cells("KL to fp32", "nats", {e: f["kl_mean"] for e, f in exact.items()}))
        rows.append(cells("KL to fp32, p99", "nats", {e: f["kl_p99"] for e, f in exact.items()}))
        rows.append(
            cells("same likeliest token", "share", {e: f["top1"] for e, f in exact.items()})
        )
    return rows


def _kept_when_busy(model: Mapping) -> dict[str, float | None]:
    lines = {line["workload"]: line for line in model["lines"] if line["figure"] == "output"}
    if not {"c8", "busy"} <= lines.keys():
        return {}
    quiet, busy = lines["c8"]["engines"], lines["busy"]["engines"]
    return {e: busy[e]["median"] / quiet[e]["median"] for e in busy if e in quiet}


def _cell(spread: Mapping[str, float] | None) -> str:
    if not spread:
        return "–"
    return f"{_short(spread['median'])} [{_short(spread['least'])}–{_short(spread['most'])}]"


def _short(value: float | None) -> str:
    """Three or four figures."""
    if value is None:
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _why(run: Mapping) -> str:
    if run.get("error"):
        return str(run["error"])
    most = next(iter(run["error_counts"]), "")
    return f"{run['failed']} failed: {most}"


def put_between_marks(page: Path, text: str) -> None:
    """Replace the text between the marks of `page`."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no lines {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _machine() -> dict[str, object]:
    from datetime import date

    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "date": str(date.today())}


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the platform's own word has to do
    return platform.processor() or platform.machine()


def entry(report: Mapping[str, dict], commit: str) -> dict:
    """One line of the history: medians by model, workload, figure and engine, with the probes."""
    return {
        "commit": commit,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": report["machine"],
        "rounds": report["rounds"],
        "share": report["share"],
        "cpu_isa": report["cpu_isa"],
        "figures": [
            {
                "model": model["model"],
                "workload": line["workload"],
                "figure": line["figure"],
                "unit": line["unit"],
                "better": line["better"],
                "read_gb_s": line["machine_read_gb_s"],
                "fp32_gflop_s": line["machine_fp32_gflop_s"],
                "engines": {peer: spread["median"] for peer, spread in line["engines"].items()},
            }
            for model in report["models"]
            for line in model["lines"]
        ],
    }


def commit_of(folder: Path) -> str:
    """The commit of a git checkout, with + for a modified tree; "" if there is none."""
    words = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def last_like(path: Path, now: Mapping[str, object]) -> dict:
    """The last run with the same machine, share and instruction set; {} if there is none.

    Lines that are not runs are skipped.
    """
    if not path.exists() or path.stat().st_size > _MOST_BYTES:
        return {}
    for line in reversed(path.read_text(encoding="utf-8").splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and _setup(found) == _setup(now):
            return found
    return {}


def changes(before: Mapping[str, list], now: Mapping[str, list]) -> Iterator[str]:
    """A line for each figure of Banyan that changed, with the machine speed of both runs."""
    known = {_key(each): each for each in before.get("figures", [])}
    for each in now["figures"]:
        was, is_ = known.get(_key(each), {}).get("engines", {}).get(OURS), each["engines"].get(OURS)
        if not was or not is_ or abs(is_ / was - 1) < _CHANGE:
            continue
        is_worse = (is_ < was) == (each["better"] == HIGH)
        old = known[_key(each)]
        yield (
            f"{'SLOWER' if is_worse else 'faster'}: {each['model']} {each['workload']} "
            f"{each['figure']} {is_:,.1f} {each['unit']}, {was:,.1f} at "
            f"{before['commit'] or 'an unknown commit'}; the machine read {each['read_gb_s']:.1f} "
            f"GB/s, {old['read_gb_s']:.1f} then, fp32 {each['fp32_gflop_s']:.0f} GFLOP/s, "
            f"{old['fp32_gflop_s']:.0f} then"
        )


def keep(path: Path, line: Mapping[str, object]) -> None:
    """Append a line, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _setup(run: Mapping[str, object]) -> tuple[dict[str, object], object, object]:
    """What must be the same for figures to be comparable."""
    machine = run.get("machine")
    facts = machine if isinstance(machine, dict) else {}
    return {k: v for k, v in facts.items() if k != "date"}, run.get("share"), run.get("cpu_isa", "")


def _key(figure: Mapping[str, object]) -> tuple[object, ...]:
    return figure["model"], figure["workload"], figure["figure"]
