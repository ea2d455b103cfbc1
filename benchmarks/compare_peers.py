"""Banyan next to its peers on this machine: `python -m benchmarks.compare_peers`.

Every engine serves the same model file over HTTP and gets the same prompts from one client. Rounds
are interleaved (A B C, then C B A), and the servers whose turn it is not are stopped by signal, so
that each has the machine to itself. Machines are noisy: read ratios of one run, with their spread.
"""

import argparse
import asyncio
import gc
import json
import signal
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop

from banyan.base.errors import BanyanError
from banyan.bench.roofline import MachinePeaks, probe
from banyan.bench.serving import run_serving
from benchmarks import fidelity, peer_report
from benchmarks.machine import PeerError, ServerProcess, busy_core
from benchmarks.peers import MODELS, PEERS, ROOT, Model, Place, peer_held_to
from benchmarks.workloads import WORKLOADS, Workload, shortened

FIRST_PORT = 8100
OURS = "banyan"
_KEPT = (
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "is_counted",
    "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms",
    "p99_itl_ms", "median_e2e_latency_ms", "total_cached_tokens", "client_cpu_share",
    "client_loop_lag_p99_ms", "error_counts",
)  # fmt: skip
"""Keys of a run that are written down."""


@dataclass
class Contest:
    """One model on every engine that can serve it, as it goes into the JSON file."""

    model: str
    skipped: dict[str, str] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)
    fidelity: dict[str, dict[str, object]] = field(default_factory=dict)
    runs: list[dict[str, object]] = field(default_factory=list)


def main() -> int:
    options = _options()
    # SIGTERM must end the servers too, and some of them are paused.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    place = Place(Path(options.dir).resolve())
    contests = []
    for name in options.model:
        _say(f"model {name}")
        contests.append(_contest(name, MODELS[name], place, options))
        report = peer_report.as_json(contests, options.rounds, options.share, options.cpu_isa)
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
        text = peer_report.as_markdown(report)
        if options.docs:
            peer_report.put_between_marks(Path(options.docs), text)
    if options.history:
        remember(Path(options.history), report)
    print(text)
    return 0


def remember(path: Path, report: dict) -> None:
    """Add a run to the history, and print what has changed since the last one like it."""
    line = peer_report.entry(report, peer_report.commit_of(ROOT))
    before = peer_report.last_like(path, line)
    for change in peer_report.changes(before, line) if before else ():
        _say(change)
    peer_report.keep(path, line)


def _contest(name: str, model: Model, place: Place, options: argparse.Namespace) -> Contest:
    contest = Contest(name)
    model.prepare(place)
    with ExitStack() as stack:
        servers = _start_all(contest, model, place, options, stack)
        for number in range(options.rounds):
            turn = list(servers.items())
            for key in options.workloads:
                workload = shortened(WORKLOADS[key], options.share)
                for peer, server in turn if number % 2 == 0 else reversed(turn):
                    if not _is_too_slow(contest, peer, key, options.max_run_s):
                        _one_run(contest, peer, server, workload, model, number, options)
        if model.is_trained and options.fidelity_steps:
            _compare_fidelity(contest, servers, model, place, options)
        contest.memory_mib = {peer: server.memory_mib() for peer, server in servers.items()}
    return contest


def _start_all(
    contest: Contest, model: Model, place: Place, options: argparse.Namespace, stack: ExitStack
) -> dict[str, ServerProcess]:
    """Start one after the other, each alone; who cannot is listed with the reason."""
    servers: dict[str, ServerProcess] = {}
    for number, peer in enumerate(options.peers):
        server = None
        try:
            engine = peer_held_to(options.cpu_isa, peer)
            engine.setup(place)
            command = engine.command(place, model, FIRST_PORT + number)
            server = ServerProcess(command, place.folder / "log" / f"{peer}.log")
            stack.callback(server.stop)
            body = {"model": "m", "prompt": [1] * 8, "max_tokens": 1, "temperature": 0}
            contest.starts[peer] = server.first_answer(body, command.start_timeout_s)
        except PeerError as error:
            contest.skipped[peer] = str(error)
            _say(f"{peer} is left out: {error}")
            if server is not None:
                server.stop()
            continue
        _say(f"{peer} answered after {contest.starts[peer]:.1f} s")
        server.pause()
        servers[peer] = server
    return servers


def _is_too_slow(contest: Contest, peer: str, workload: str, limit_s: float) -> bool:
    """Whether an earlier round took so long that it is not repeated."""
    mine = [r for r in contest.runs if (r["peer"], r["workload"]) == (peer, workload)]
    return any(isinstance(r.get("duration"), float) and r["duration"] > limit_s for r in mine)


def _one_run(
    contest: Contest,
    peer: str,
    server: ServerProcess,
    workload: Workload,
    model: Model,
    number: int,
    options: argparse.Namespace,
) -> None:
    machine = probe()
    seed = (number + 1) * 1000 + options.workloads.index(workload.name)
    settings = workload.seeded(seed, model.vocab_size)
    settings = replace(settings, base_url=server.url, model="m")
    run: dict[str, object] = {"peer": peer, "workload": workload.name, "round": number}
    server.resume()
    try:
        with (
            busy_core() if workload.is_disturbed else nullcontext(),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            finished = runner.run(run_serving(settings, None))
    except BanyanError as error:
        run["error"] = str(error)
        _say(f"{workload.name} {peer}: {error}")
    else:
        keys = finished.keys
        run |= {key: keys[key] for key in _KEPT}
        if keys["completed"]:
            run["figures"] = {figure.name: figure.read(keys) for figure in workload.figures}
        run["warnings"] = finished.warnings
        _say(f"{workload.name} {peer}: {_shown(run)}  ({machine})")
    finally:
        server.pause()
    run |= _machine_keys(machine)
    contest.runs.append(run)
    gc.collect()


def _compare_fidelity(
    contest: Contest,
    servers: dict[str, ServerProcess],
    model: Model,
    place: Place,
    options: argparse.Namespace,
) -> None:
    try:
        reference = fidelity.make_reference(place, model, contest.model, options.fidelity_steps)
    except PeerError as error:
        contest.skipped["fidelity"] = str(error)
        _say(f"no fidelity: {error}")
        return
    for peer, server in servers.items():
        server.resume()
        try:
            found = fidelity.measure(server.url, peer == OURS, PEERS[peer].score_fields, reference)
            contest.fidelity[peer] = found.keys()
            _say(f"fidelity {peer}: {found}")
        except (PeerError, KeyError, IndexError, TypeError, ValueError) as error:
            contest.fidelity[peer] = {"error": f"{type(error).__name__}: {error}"}
            _say(f"fidelity {peer}: {type(error).__name__}: {error}")
        finally:
            server.pause()


def _machine_keys(machine: MachinePeaks) -> dict[str, object]:
    return {f"machine_{key}": value for key, value in machine.keys().items()}


def _shown(run: dict[str, object]) -> str:
    figures = run.get("figures")
    if not isinstance(figures, dict):
        return f"nothing completed: {run['error_counts']}"
    return ", ".join(f"{name} {value:.1f}" for name, value in figures.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare_peers", description=__doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["smollm2"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--max-run-s", type=float, default=180, help="what took longer is not repeated"
    )
    parser.add_argument(
        "--cpu-isa", choices=["avx2"], default="", help="hold all to it; who cannot is left out"
    )
    parser.add_argument("--dir", default=str(ROOT / ".peers"), help="where the peers live")
    parser.add_argument("--out", default="peers.json")
    parser.add_argument("--history", default="", help="file that gets a line of JSON per run")
    parser.add_argument("--docs", default="", help="page whose table is replaced")
    parser.add_argument("--fidelity-steps", type=int, default=8, help="per prompt; 0 = none")
    parser.add_argument("--share", type=float, default=1.0, help="of each workload, for trying")
    options = parser.parse_args()
    if options.rounds < 1 or not 0 < options.share <= 1:
        parser.error("--rounds must be at least 1 and --share in (0, 1]")
    return options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
