"""Prefill servers, decode servers, their router and the way between them, struck at every state of
a handoff: every request is answered by others, or ends in time with word of what happened; who was
not struck stays well, and keeps no page.

PAIR_FAULTS strikes of each kind are tried at each state (`make test-pair-faults`: one; COUNT=20 for
more); without it, none. PAIR_TRANSFER (BY=ascend) names what carries the pages.
"""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from banyan.llm import Engine
from tests.support.transfer_engines import OF_DEVICES, flags_of
from tests.system.gate import BY_ENGINE, STATES, Gates
from tests.system.handing import FLAGS
from tests.system.routing import launch_router
from tests.system.serving import Server, free_port, launch, status_of, wait_ready, wait_until

FAULTS = int(os.environ.get("PAIR_FAULTS", "0"))
TRANSFER = os.environ.get("PAIR_TRANSFER", "tcp")
pytestmark = pytest.mark.skipif(not FAULTS, reason="make test-pair-faults")

HEARTBEAT_S = 5.0
"""A server that gives is silent for so long at most; router and watchdogs are set accordingly."""
NOTICE_S = HEARTBEAT_S + 1.0
STOPPED_S = HEARTBEAT_S + 2.0
BACK_S = 90.0
ANSWERING = "answering"
STREAMED = ("taken", ANSWERING)
"""States of requests whose answers have begun, and have no end."""
TARGETS = ("prefill server", "prefill engine", "decode server", "decode engine", "router", "way")
BLOWS = ("kill", "stop")
"""Of the way: it is cut, or nothing passes any more."""
BYSTANDERS = 3
TIE = 0.2
"""Of log-probabilities: logits near 10 have steps of 1/16 in bfloat16."""
TOKENS = 24
PAIR = (
    *("--json-model-override-args", json.dumps({"max_position_embeddings": 40_000})),
    *("--max-total-tokens", "100000", "--threads", "1", "--incremental-streaming-output"),
    *("--watchdog-timeout", "4", "--engine-restart-window", "0"),
)
ROUTER = (
    *("--pd-disaggregation", "--policy", "round_robin", "--cb-failure-threshold", "1000"),
    *("--health-check-interval-secs", "0.5", "--health-check-timeout-secs", "4"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--worker-startup-check-interval", "0.2"),
)


@dataclass
class Site:
    """Two prefill and two decode servers behind a router, each of which can be started again."""

    folder: Path
    model: Path
    ports: dict[str, int]
    gates: Gates
    transfer: tuple[str, ...] = ()
    servers: dict[str, Server] = field(default_factory=dict[str, Server])
    starts: int = 0

    @property
    def router(self) -> str:
        return self.servers["router"].url

    def start(self, name: str) -> None:
        if name in self.servers:
            self.servers[name].kill()
        self.starts += 1
        log = self.folder / f"{name}-{self.starts}.log"
        url = {n: f"http://127.0.0.1:{port}" for n, port in self.ports.items()}
        if name == "router":
            flags: list[str] = []
            for at in range(2):
                flags += ("--prefill", url[f"prefill{at}"], str(self.gates.ports[at]))
                flags += ("--decode", url[f"decode{at}"])
            self.servers[name] = launch_router(log, *ROUTER, *flags)
            return
        mode, at = name[:-1], name[-1]
        rooms = ("--disaggregation-bootstrap-port", str(self.ports[f"rooms{at}"]))
        flags = ["--disaggregation-mode", mode, *(rooms if mode == "prefill" else ())]
        if mode == "prefill" and TRANSFER not in OF_DEVICES:  # pages are cut on their way
            flags += ("--page-size", "32")
        model = ("--model-path", str(self.model))
        self.servers[name] = launch(
            log, *model, *PAIR, *self.transfer, *flags, port=self.ports[name]
        )

    def loads(self) -> dict[str, int]:
        """Requests that the router has open at each server, by its name."""
        answer = httpx.get(f"{self.router}/workers", timeout=60).json()["workers"]
        names = {f"http://127.0.0.1:{port}": name for name, port in self.ports.items()}
        return {names[one["url"]]: one["load"] for one in answer}

    def trouble(self, without: str = "") -> str:
        """What is not as it is at rest, of all servers but one; "" = nothing."""
        for name, server in self.servers.items():
            if name == without:
                continue
            if server.process.poll() is not None or status_of(server, "/readyz") != 200:
                return f"{name} is not ready"
            if name == "router":
                continue
            stats = server.stats()
            kept = ("held_pages", "in_flight_pages", "running", "waiting", "leaked", "open_rooms")
            left = {what: stats[what] for what in kept if stats[what]}
            if left:
                return f"{name} has {left}"
        return ""

    def rest(self, without: str = "") -> None:
        """Wait until nothing is left of any request."""
        until = time.monotonic() + BACK_S
        while answer := self.trouble(without):
            assert time.monotonic() < until, answer
            time.sleep(0.1)
        if not without:
            wait_until(lambda: all(self._well()), BACK_S, "the router to see all of them well")

    def _well(self) -> list[bool]:
        answer = httpx.get(f"{self.router}/workers", timeout=60).json()["workers"]
        return [one["is_healthy"] for one in answer]


@pytest.fixture(scope="module")
def transfer() -> Iterator[tuple[str, ...]]:
    """The flags of what carries the pages, with its variables set."""
    with pytest.MonkeyPatch.context() as patch:
        yield () if TRANSFER == "tcp" else flags_of(TRANSFER, patch)


@pytest.fixture(scope="module")
def site(
    transfer: tuple[str, ...], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    pairs = [f"{kind}{at}" for at in range(2) for kind in ("prefill", "decode", "rooms")]
    ports = {name: free_port() for name in pairs}
    gates = Gates([ports["rooms0"], ports["rooms1"]], BY_ENGINE if transfer else STATES)
    found = Site(tmp_path_factory.mktemp("faults"), tiny_model, ports, gates, transfer)
    try:
        for name in ("prefill0", "prefill1", "decode0", "decode1", "router"):
            found.start(name)
        for server in found.servers.values():
            wait_ready(server)
        found.rest()
        yield found
    finally:
        for name, server in found.servers.items():
            print(f"--- {name}\n{server.tail()}")
            server.kill()
        gates.close()


@pytest.fixture(scope="module")
def right(transfer: tuple[str, ...], tiny_model: Path) -> Iterator[Engine]:
    """What one engine answers, on the same device."""
    flags = {**FLAGS, "engine_mode": "normal"}
    if "--device" in transfer:
        flags |= {"device": "npu", "dtype": "bfloat16"}
    with Engine(str(tiny_model), **flags) as engine:
        yield engine


@dataclass
class Ask:
    """One request in a thread of its own."""

    url: str
    prompt: list[int]
    streams: bool = False
    said: list[int] = field(default_factory=list[int])
    status: int = 0
    """0 = the connection has ended."""
    ended_s: float = 0.0
    began: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)

    def start(self) -> "Ask":
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self) -> None:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": self.prompt, "sampling_params": sampling, "stream": self.streams}
        if self.streams:
            sampling["max_new_tokens"] = 38_000
        with contextlib.suppress(httpx.TransportError):
            if self.streams:
                self._read(body)
            else:
                answer = httpx.post(f"{self.url}/generate", json=body, timeout=120)
                self.status = answer.status_code
                self.said = answer.json()["output_ids"] if self.status == 200 else []
        self.ended_s = time.monotonic()

    def _read(self, body: dict[str, object]) -> None:
        with httpx.stream("POST", f"{self.url}/generate", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if self.leave.is_set():
                    self.status = 200
                    return
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.status = event["error"]["code"]
                    return
                self.said += event["output_ids"]
                self.began.set()


def prompt_of(draw: random.Random) -> list[int]:
    """Pages enough to be struck among them, and of no other prompt."""
    return [draw.randrange(5, 400) for _ in range(draw.randrange(130, 400))]


def strike(site: Site, target: str, blow: str, name: str) -> list[int]:
    """Processes that were stopped."""
    held = site.gates.held
    if target == "way":
        if blow == "kill" and held is not None:
            held.cut()
        return []
    number = signal.SIGKILL if blow == "kill" else signal.SIGSTOP
    server = site.servers[name]
    pid = server.engine_pid() if target.endswith("engine") else server.pid
    if target.endswith("engine") or blow == "stop":
        os.kill(pid, number)
    else:
        os.killpg(pid, number)
    return [pid] if blow == "stop" else []


def one_fault(site: Site, right: Engine, target: str, blow: str, state: str, seed: str) -> str:
    """Bring a request to this state, strike there, and look at what becomes of all; what became of
    the request."""
    draw = random.Random(seed)
    site.gates.arm("" if state == ANSWERING else state)
    main = Ask(site.router, prompt_of(draw), state in STREAMED).start()
    if state == ANSWERING:
        assert main.began.wait(BACK_S), "no answer begins"
    else:
        assert site.gates.reached.wait(BACK_S), f"no request comes to the state {state}"
    loads, held = site.loads(), site.gates.held
    decode = next(name for name, load in loads.items() if load and name.startswith("decode"))
    prefill = f"prefill{held.gate if held else 0}"
    name = {"prefill": prefill, "decode": decode, "router": "router"}.get(target.split()[0], "")
    others = [Ask(site.router, prompt_of(draw)).start() for _ in range(BYSTANDERS)]
    stopped = strike(site, target, blow, name)
    began = time.monotonic()
    if held is not None and not (target == "way" and blow == "stop"):
        held.release.set()
    if stopped:
        time.sleep(STOPPED_S)  # for so long it is stopped
    if not (target == "router" and stopped):
        if state in STREAMED:
            leave_or_end(main, is_struck=name in (decode, "router"))
        for ask in (main, *others):
            ask.thread.join(BACK_S)
            assert not ask.thread.is_alive(), f"a request has no end: {seed}"
        site.rest(without=name or "nobody")
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):  # it has been replaced
            os.kill(pid, signal.SIGCONT)
    if held is not None:
        held.release.set()
    main.leave.set()
    for ask in (main, *others):
        ask.thread.join(BACK_S)
        judge(ask, right, target, began, bool(stopped), seed)
    if blow == "kill" and target.endswith(("server", "router")):
        site.start(name)
    site.rest()
    return f"{main.status or 'connection ended'}"


def leave_or_end(main: Ask, is_struck: bool) -> None:
    """A stream whose server was struck ends; another one goes on until it is left."""
    if not is_struck:
        seen = len(main.said)
        wait_until(lambda: len(main.said) > seen + 50 or bool(main.ended_s), BACK_S, "tokens")
        main.leave.set()


def misses(prompt: list[int], said: list[int], num: int, right: Engine) -> list[int]:
    """Places of tokens that are none of the answer. A device of 16 bits rounds by how a prompt came
    to it, so each token is held against the best behind those before it, but for ties."""
    if TRANSFER not in OF_DEVICES:
        params = {"temperature": 0, "max_new_tokens": num, "ignore_eos": True}
        whole = right.generate(input_ids=prompt, sampling_params=params)["output_ids"]
        return [at for at in range(max(num, len(said))) if said[at : at + 1] != whole[at : at + 1]]
    found = right.generate(
        input_ids=prompt + said,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
        top_logprobs_num=1,
    )["meta_info"]
    reported = list(zip(found["input_token_logprobs"], found["input_top_logprobs"], strict=True))
    behind = reported[-len(said) :]
    assert [token for (_, token, _), _ in behind] == said
    return [at for at, ((mine, *_), ((best, *_), *_)) in enumerate(behind) if mine < best - TIE]


def judge(ask: Ask, right: Engine, target: str, began: float, is_stopped: bool, seed: str) -> None:
    """Whether an answer is right, and a failure came in time."""
    num = min(len(ask.said), 1000) if ask.streams else TOKENS
    if ask.said:
        assert misses(ask.prompt, ask.said[:num], num, right) == [], f"another answer: {seed}"
    if ask.status == 200:
        return
    if target == "router":
        assert ask.status in (0, 503, 504), (ask.status, seed)
        return
    assert ask.status in (503, 504), (ask.status, seed)
    took = ask.ended_s - began
    assert took < NOTICE_S, f"{took:.1f} s until {ask.status}: {seed}"


@pytest.mark.parametrize("blow", BLOWS)
@pytest.mark.parametrize("target", TARGETS)
def test_requests_end_well_or_in_time_wherever_it_strikes(
    site: Site, right: Engine, target: str, blow: str
) -> None:
    states = [state for state in (*STATES, ANSWERING) if target != "way" or state != ANSWERING]
    for state in states:
        ends = Counter[str]()
        began = time.monotonic()
        for at in range(FAULTS):
            seed = f"{target}, {blow}, {state}, {at}"
            ends[one_fault(site, right, target, blow, state, seed)] += 1
        reported = ", ".join(f"{n} x {what}" for what, n in sorted(ends.items()))
        seconds = (time.monotonic() - began) / FAULTS
        print(f"\n| {target} | {blow} | {state} | {reported} | {seconds:.1f} s |", flush=True)


@pytest.mark.skipif(TRANSFER != "tcp", reason="what lands is spoiled in tests/transfer")
def test_pages_that_are_changed_on_their_way_are_computed(site: Site, right: Engine) -> None:
    draw = random.Random(23)
    for _ in range(FAULTS):
        site.gates.arm("a page")
        ask = Ask(site.router, prompt_of(draw)).start()
        assert site.gates.reached.wait(BACK_S)
        before = sum(site.servers[f"decode{at}"].stats()["computed_tokens"] for at in range(2))
        assert site.gates.held is not None
        site.gates.held.spoils = True
        site.gates.held.release.set()
        ask.thread.join(BACK_S)
        judge(ask, right, "way", time.monotonic(), False, "spoiled")
        assert ask.status == 200
        site.rest()
        after = sum(site.servers[f"decode{at}"].stats()["computed_tokens"] for at in range(2))
        assert after - before > len(ask.prompt) - 3 * 16, "what came after the page was computed"
