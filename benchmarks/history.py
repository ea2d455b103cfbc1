"""What earlier comparisons found: a line of JSON per run, so that a slower commit is seen.

A line says commit, time, machine and what the machine could do in that run; figures of Banyan are
held against the last run of the same machine with the same workloads.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.workloads import HIGH

OURS = "banyan"
_TOLD_FROM = 0.05
"""Of a figure, and of a probe: what changes by less is noise."""
_MOST_BYTES = 64 << 20


def entry(report: Mapping[str, dict], commit: str) -> dict:
    """One line: medians of every engine by model, workload and figure, the probes beside them."""
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
    """Of a git checkout, with + where files differ from it; "" where that cannot be told."""
    words = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def last_like(path: Path, now: Mapping[str, object]) -> dict:
    """The last run on such a machine with such shares and instructions; {} where there is none.
    Lines that are no runs are passed over."""
    if not path.exists() or path.stat().st_size > _MOST_BYTES:
        return {}
    for line in reversed(path.read_text(encoding="utf-8").splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and _kind(found) == _kind(now):
            return found
    return {}


def changes(before: Mapping[str, list], now: Mapping[str, list]) -> Iterator[str]:
    """A line for each figure of Banyan that differs, with what the machine could do both times."""
    known = {_key(each): each for each in before.get("figures", [])}
    for each in now["figures"]:
        was, is_ = known.get(_key(each), {}).get("engines", {}).get(OURS), each["engines"].get(OURS)
        if not was or not is_ or abs(is_ / was - 1) < _TOLD_FROM:
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


def _kind(run: Mapping[str, object]) -> tuple[dict[str, object], object, object]:
    """What must be the same for figures to be comparable."""
    machine = run.get("machine")
    facts = machine if isinstance(machine, dict) else {}
    return {k: v for k, v in facts.items() if k != "date"}, run.get("share"), run.get("cpu_isa", "")


def _key(figure: Mapping[str, object]) -> tuple[object, ...]:
    return figure["model"], figure["workload"], figure["figure"]
