"""Engines and ranks that are killed or stopped under load, in every layout of processes: what
clients see, how long it takes until all of it serves again by itself, and what remains.

FAULTS faults are tried in each layout (`make test-faults`: twenty; `make test-rank-faults COUNT=2`
for fewer), by default two in one of them, a kill and a stop. Each layout prints a line of the table
in docs/operations.md.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest

from banyan.sim.replay import check
from tests.models.families import tiny
from tests.support.streams import ENDLESS, ends_in_one_error, finished, load
from tests.system.serving import (
    CALL_S,
    Server,
    free_port,
    launch,
    open_files,
    runs,
    status_of,
    wait_ready,
    wait_until,
)

ALL = "FAULTS" in os.environ
FAULTS = int(os.environ.get("FAULTS", "2"))
BACK_S = 90.0
DEADLINE_S = 3.0
NOTICE_S, AGAIN_S = 2.0, 10.0
"""From a kill to a 503, and from any of them until all serves again."""
FLAGS = (
    *("--watchdog-timeout", f"{DEADLINE_S:g}", "--engine-restart-window", "0"),
    *("--threads", "1", "--log-level", "info", "--decode-log-interval", "100000", *ENDLESS),
)
NUM_STREAMS = 4
ASKED = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
LAYOUTS = {
    "one rank": (),
    "--tp 2": ("--tp-size", "2"),
    "--pp 2": ("--pp-size", "2"),
    "--dp 2": ("--dp-size", "2"),
    "two nodes": ("--tp-size", "2", "--nnodes", "2"),
    "--tp 4": ("--tp-size", "4"),
    "--tp 2 --pp 2": ("--tp-size", "2", "--pp-size", "2"),
    "dp-attention 2": ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
    "--ep 2": ("--tp-size", "2", "--ep-size", "2", "--skip-tokenizer-init"),
}
EXPERTS = ("--ep 2",)
"""Layouts of a model with experts."""
NOTICED_S = 5.0


@dataclass
class Site:
    """A server, and the program of another node where there is one."""

    running: Server
    num_replicas: int
    start_node: Callable[[], Server] | None = None
    nodes: list[Server] = field(default_factory=list)
    """The last one lives."""

    def targets(self, number: signal.Signals) -> list[int]:
        """Processes to which this may happen. A node's program is only killed: whoever keeps it
        running starts it again when it ends, and does not see that it is stopped."""
        servers = [self.running, *self.nodes[-1:]]
        found = [p for s in servers for p in s.members() if _is_ours(p)]
        if self.nodes and number == signal.SIGKILL:
            found.append(self.nodes[-1].pid)
        return sorted(found)

    def strike(self, pid: int, number: signal.Signals) -> None:
        os.kill(pid, number)
        if self.nodes and pid == self.nodes[-1].pid and self.start_node is not None:
            self.nodes[-1].exit_code(60.0)
            self.nodes.append(self.start_node())

    def is_whole(self) -> bool:
        if status_of(self.running, "/readyz") != 200:
            return False
        return len(self.running.facts()["internal_states"]) == self.num_replicas


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def _is_ours(pid: int) -> bool:
    """Whether it is an engine or a rank."""
    return runs(pid, "banyan.server.processes")


@contextlib.contextmanager
def site(log: Path, model: Path, layout: str) -> Iterator[Site]:
    port, flags = free_port(), ("--model-path", str(model), *FLAGS, *LAYOUTS[layout])
    if "--nnodes" in flags:
        flags = (*flags, "--dist-init-addr", f"127.0.0.1:{port}")
    found = Site(launch(log / "server.log", *flags), 2 if "--dp-size" in flags else 1)
    try:
        if "--nnodes" in flags:

            def start_node() -> Server:
                name = f"node{len(found.nodes)}.log"
                return launch(log / name, *flags, "--node-rank", "1")

            found.start_node = start_node
            found.nodes.append(start_node())
        wait_ready(found.running)
        yield found
    except BaseException:
        for server in (found.running, *found.nodes):
            print(f"--- {server.log.name}\n{server.tail()}")
        raise
    finally:
        for server in (found.running, *found.nodes):
            server.kill()


def missing_of(log: Path, begins: int, struck: int) -> str:
    """What the log lacks of a killed rank: who it was, the step, and where the others stand."""
    text = log.read_text(errors="replace")[begins:]
    wanted = (f"(pid {struck})", "in flight: step=", "stack traces of rank 0")
    return ", ".join(words for words in wanted if words not in text)


def has_one_end(events: list[dict]) -> bool:
    """The last event says that it is the last, and no other does."""
    return ends_in_one_error(events) or finished(events) == ["length"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS if ALL else ["--tp 2"])
def test_what_is_killed_or_stopped_under_load_is_replaced_and_leaves_nothing(
    layout, tiny_model, tmp_path, monkeypatch, request
):
    model = tiny_model
    if layout in EXPERTS:
        model = tmp_path / "experts"
        tiny("qwen3 moe, six of 21", model)
    place = Path(tempfile.mkdtemp(prefix="f"))  # short: addresses of sockets lie in it
    request.addfinalizer(lambda: shutil.rmtree(place, ignore_errors=True))
    monkeypatch.setenv("TMPDIR", str(place))
    draw = random.Random(layout)
    took_s: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
    noticed_s: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
    num_errors = 0
    with site(tmp_path, model, layout) as found:
        running = found.running
        expected = running.generate(**ASKED)["output_ids"]
        files = open_files(running.pid)
        for fault in range(FAULTS):
            number = (signal.SIGKILL, signal.SIGSTOP)[fault % 2]
            streams = load(running, NUM_STREAMS, max_new_tokens=12_000)
            time.sleep(draw.random())  # the moment is what is tested
            struck = draw.choice(found.targets(number))
            is_rank = psutil.Process(struck).ppid() in running.engine_pids()
            begins = len(running.log.read_text(errors="replace"))
            began = time.monotonic()
            found.strike(struck, number)
            noticed = wait_until(lambda: not found.is_whole(), CALL_S, "the fault to be noticed")
            noticed_s[number.name].append(noticed)
            if is_rank and number == signal.SIGKILL:
                lacks = partial(missing_of, running.log, begins, struck)
                wait_until(lambda lacks=lacks: not lacks(), 60.0, f"the log to tell: {lacks()}")
            wait_until(found.is_whole, BACK_S, f"all to serve again after {number.name}")
            took_s[number.name].append(time.monotonic() - began)
            ends = [stream.end(CALL_S) for stream in streams]
            assert all(has_one_end(events) for events in ends)
            num_errors += sum(ends_in_one_error(events) for events in ends)
            assert running.generate(**ASKED)["output_ids"] == expected
            wait_until(partial(_is_gone, struck), BACK_S, "what was struck to be gone")
        assert num_errors >= FAULTS, "some streams ran where it happened"
        assert open_files(running.pid) <= files + 8, "each life of an engine leaves descriptors"
        running.signal(signal.SIGTERM)
        assert running.exit_code(60.0) == 0
        for server in (running, *found.nodes):
            wait_until(lambda s=server: s.members() == [], 60.0, "the children to end")
    # The folder of a killed program of a node goes with the next that starts, after a minute.
    programs = {str(node.pid) for node in found.nodes}
    left = [path.name for path in place.glob("banyan-*")]
    assert [name for name in left if name.split("-")[2] not in programs] == []
    assert [name for name in os.listdir("/dev/shm") if name.startswith("banyan")] == []
    reported = " | ".join(
        f"{len(t)} | {statistics.median(t):.1f} s | {max(t):.1f} s" for t in took_s.values() if t
    )
    figures = "; ".join(
        f"{len(t)} × {name}: 503 after {max(noticed_s[name]):.1f} s at most, ready again after "
        f"{statistics.median(t):.1f} s median, {max(t):.1f} s at most"
        for name, t in took_s.items()
        if t
    )
    print(f"\nfigure: {layout}: {figures}; {FAULTS * NUM_STREAMS} streams that ended once")
    print(
        f"\n| {layout} | {reported} | {FAULTS * NUM_STREAMS} of {FAULTS * NUM_STREAMS} | nothing |"
    )
    if "FAULTS_JUDGED" in os.environ:
        assert max(noticed_s["SIGSTOP"], default=0.0) < NOTICED_S
        assert max(noticed_s["SIGKILL"]) < NOTICE_S
        assert max(t for some in took_s.values() for t in some) < AGAIN_S


def test_the_requests_before_a_loss_are_dumped_when_that_is_asked_for(tiny_model, tmp_path):
    folder = tmp_path / "dumps"
    flags = ("--crash-dump-folder", str(folder), "--threads", "1", *ENDLESS)
    running = launch(tmp_path / "server.log", "--model-path", str(tiny_model), *flags)
    try:
        wait_ready(running)
        running.generate(**ASKED)
        streams = load(running, 1, max_new_tokens=12_000)
        (engine,) = [pid for pid in running.members() if _is_ours(pid)]
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            stream.end(CALL_S)
        wait_until(lambda: any(folder.glob("*.journal")), BACK_S, "the dumps")
        (path,), (journal,) = folder.glob("*.jsonl"), folder.glob("*.journal")
        _, *found = map(json.loads, path.read_text().splitlines())
        assert [(one["prompt_ids"], one["reason"]) for one in found][0] == ([5, 6, 7], "length")
        assert found[-1]["reason"] == "engine_unavailable" and len(found) == 2
        wait_until(lambda: status_of(running, "/readyz") == 200, BACK_S, "the engine to be back")
        report = check(str(journal))
        assert report.ok and report.plans > 2, report  # two prompts, and one step at the least
    finally:
        running.kill()
