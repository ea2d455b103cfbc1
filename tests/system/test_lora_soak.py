"""Many adapters that come and go under load while ranks are killed: each answer is that of the very
adapter, and version of it, that was named, and nothing is left behind.

LORA_REQUESTS requests are sent (`make test-lora`: 10,000, with fifty adapters), by default a few
hundred with ten; LORA_SEED draws others. Plain torch says what is right, from weights that each
adapter is merged into.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.support.lora import ALL_TARGETS, write_adapter
from tests.system.serving import Server, open_files, serving, status_of, wait_until

REQUESTS = int(os.environ.get("LORA_REQUESTS", "150"))
IS_LONG = REQUESTS > 1000
NAMES = [f"adapter-{number}" for number in range(50 if IS_LONG else 10)]
KILLS = max(1, REQUESTS // 1500)
RANKS = (4, 8, 16, 32, 64, 128, 256) if IS_LONG else (4, 16, 64)
MAX_LOADED, MAX_RUNNING, CLIENTS = len(NAMES) // 3, 3, 6
TOKENS = 6
PROMPTS = [[(seed * 31 + 7 * i * i + i) % 300 + 3 for i in range(20)] for seed in range(3)]
SEED = int(os.environ.get("LORA_SEED", "18"))
DEADLINE_S = 120.0
MARGIN = 0.01
"""Between the logits of the two likeliest tokens."""

Version = tuple[str, int]
"""Name of an adapter, and which of the two folders it was loaded from; ("", 0) is the base."""


def random_adapter(folder: Path, seed: int) -> Path:
    rng = random.Random(seed)
    targets = rng.sample(ALL_TARGETS, rng.randint(2, len(ALL_TARGETS)))
    rank = rng.choice(RANKS)
    return write_adapter(folder, seed, rank, targets, use_rslora=False, lora_alpha=2 * rank)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Version, Path]:
    """Two versions of each adapter."""
    root = tmp_path_factory.mktemp("soak")
    return {
        (name, version): random_adapter(root / f"{name}-{version}", 2 * number + version)
        for number, name in enumerate(NAMES)
        for version in (0, 1)
    }


@pytest.fixture(scope="module")
def right(tiny_model: Path, folders: dict[Version, Path]) -> dict[Version, list[list[int]]]:
    """What each version says to each prompt, by plain torch; no two say the same."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    found = {("", 0): _answers(model)}
    for version, folder in folders.items():
        tensors = load_file(folder / "adapter_model.safetensors")
        weights = dict(model.named_parameters())
        before = {}
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            weight = weights[name.removeprefix("base_model.model.").replace("lora_A.", "")]
            before[weight] = weight.detach().clone()
            with torch.no_grad():
                weight += 2 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        found[version] = _answers(model)
        with torch.no_grad():
            for weight, values in before.items():
                weight.copy_(values)
    for number in range(len(PROMPTS)):
        sure = [tuple(answers[number]) for answers in found.values() if answers[number]]
        assert len(set(sure)) == len(sure) > 0.8 * len(found)
    return found


def _answers(model: torch.nn.Module) -> list[list[int]]:
    """The likeliest tokens behind each prompt; [] where rounding may choose another one."""
    ids, margins = torch.tensor(PROMPTS), torch.full((len(PROMPTS),), torch.inf)
    with torch.no_grad():
        for _ in range(TOKENS):
            best = model(ids).logits[:, -1].topk(2)
            margins = margins.minimum(best.values[:, 0] - best.values[:, 1])
            ids = torch.cat([ids, best.indices[:, :1]], 1)
    sure = (margins > MARGIN).tolist()
    return [
        a if is_sure else [] for a, is_sure in zip(ids[:, -TOKENS:].tolist(), sure, strict=True)
    ]


@dataclass
class Soak:
    """What is there, what was answered, and what was wrong."""

    server: Server
    folders: dict[Version, Path]
    right: dict[Version, list[list[int]]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    here: dict[str, int] = field(default_factory=dict)
    """Name -> its version; not while it comes or leaves."""
    changes: Counter[str] = field(default_factory=Counter)
    """Name -> how often it came or left."""
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[object] = field(default_factory=list)

    def count(self, what: str) -> int:
        with self.lock:
            self.counts[what] += 1
            return self.counts[what]

    def ask(self, rng: random.Random) -> None:
        """One request of one adapter, or of none, until it has its answer."""
        with self.lock:
            name = rng.choice(["", *self.here])
            seen, version = self.changes[name], self.here.get(name, 0)
        known = [self.right[name, v] for v in ((0, 1) if name else (0,))]
        sure = [at for at in range(len(PROMPTS)) if all(answers[at] for answers in known)]
        prompt = rng.choice(sure)
        params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": PROMPTS[prompt], "sampling_params": params}
        body["lora_path"] = name or None
        if rng.random() < 0.04:
            self.leave_early({**body, "sampling_params": {**params, "max_new_tokens": 200}})
        end = time.monotonic() + DEADLINE_S
        while True:
            answer = self.server.http.post("/generate", json=body)
            with self.lock:
                has_changed = self.changes[name] != seen
            if answer.status_code == 200:
                may_be = (0, 1) if has_changed and name else (version,)
                expected = [self.right[name, v][prompt] for v in may_be]
                if answer.json()["output_ids"] not in expected:
                    self.wrong.append((name, prompt, self.whose(prompt, answer)))
                self.count("answered")
                return
            # 404 where it left after the request was taken in.
            is_refused = answer.status_code in (400, 404) and "is not loaded" in answer.text
            if is_refused and has_changed:
                assert f"{name}," not in answer.text.partition("There are:")[2]
                self.count("refused, as the adapter had left")
                return
            assert answer.status_code >= 500 and time.monotonic() < end, answer.text
            self.count("asked again after a kill")
            time.sleep(0.1)

    def leave_early(self, body: dict[str, object]) -> None:
        """A client that goes away in the middle of its answer."""
        with (
            contextlib.suppress(httpx.TransportError, StopIteration),
            self.server.http.stream("POST", "/generate", json={**body, "stream": True}) as stream,
        ):
            next(stream.iter_lines())
        self.count("left early")

    def whose(self, prompt: int, answer: httpx.Response) -> object:
        found = answer.json()["output_ids"]
        return [v for v, answers in self.right.items() if answers[prompt] == found] or found

    def load(self, name: str, version: int, pinned: bool = False) -> None:
        body = {"lora_name": name, "lora_path": str(self.folders[name, version]), "pinned": pinned}
        self.change("/load_lora_adapter", body, "already")
        with self.lock:
            self.here[name] = version

    def unload(self, name: str) -> None:
        with self.lock:
            self.changes[name] += 1
            del self.here[name]
        self.change("/unload_lora_adapter", {"lora_name": name}, "is not loaded")

    def change(self, path: str, body: dict[str, object], is_done: str) -> None:
        """Ask until it is so: a kill may come between a change and its answer."""
        end = time.monotonic() + DEADLINE_S
        while (answer := self.server.http.post(path, json=body)).status_code != 200:
            if answer.status_code == 400 and is_done in answer.text:
                break
            assert time.monotonic() < end, f"{path} {body}: {answer.text}"
            time.sleep(0.1)
        self.count(path.split("_")[0].strip("/") + "ed")

    def operate(self, rng: random.Random, stop: threading.Event) -> None:
        """Take adapters away and bring them back, at times as another version."""
        while not stop.is_set():
            with self.lock:
                name = rng.choice(list(self.here))
            self.unload(name)
            self.load(name, rng.randrange(2))

    def kill(self, rng: random.Random) -> None:
        wait_until(lambda: status_of(self.server, "/readyz") == 200, DEADLINE_S, "an engine")
        pids = [*self.server.engine_pids(), *self.server.rank_pids()]
        victim = psutil.Process(rng.choice(pids))
        victim.send_signal(signal.SIGKILL)
        wait_until(lambda: not victim.is_running(), DEADLINE_S, "the victim's end")
        self.count("kills")


def soak(state: Soak) -> None:
    stop, asked = threading.Event(), iter(range(REQUESTS))
    due = [REQUESTS * (at + 1) // (KILLS + 1) for at in range(KILLS)]

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while True:
            with state.lock:
                number = next(asked, None)
            if number is None:
                return
            if number in due:
                state.kill(rng)
            state.ask(rng)

    with ThreadPoolExecutor(CLIENTS + 1) as pool, contextlib.ExitStack() as ending:
        ending.callback(stop.set)
        operator = pool.submit(state.operate, random.Random(SEED), stop)
        for worker in [pool.submit(client, SEED + 1 + at) for at in range(CLIENTS)]:
            worker.result()
        stop.set()
        operator.result()


def check_that_nothing_is_left(state: Soak) -> None:
    """No page, no file, and no place of an adapter."""
    server = state.server

    def is_quiet() -> bool:
        now = server.stats()
        return not (now["running"] or now["waiting"] or now["in_flight_pages"])

    wait_until(lambda: status_of(server, "/readyz") == 200, DEADLINE_S, "the last engine")
    wait_until(is_quiet, DEADLINE_S, "all requests to end")
    assert server.stats()["leaked"] == 0
    for pid in (server.pid, *server.members()):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                assert "adapter_" not in os.readlink(link), f"{pid} holds {os.readlink(link)}"
        assert "adapter_" not in Path(f"/proc/{pid}/maps").read_text(), f"{pid} maps a file"
    for name in list(state.here):
        state.unload(name)
    assert [
        model_config["id"] for model_config in server.http.get("/v1/models").json()["data"]
    ] == ["base"]
    for at, name in enumerate(NAMES[:MAX_LOADED]):  # as many as fit, if every place is free
        state.load(name, 1, pinned=at < MAX_LOADED - 1)
    rng = random.Random(0)
    for _ in range(3 * MAX_LOADED):
        state.ask(rng)


def test_every_answer_is_that_of_the_adapter_that_was_named(
    folders, right, tiny_model, tmp_path
) -> None:
    flags = ("--model-path", str(tiny_model), "--served-model-name", "base", "--threads", "1")
    flags += ("--tp-size", "2", "--max-total-tokens", "4096", "--engine-restart-window", "0")
    flags += ("--cpu-activations", "fp32", "--enable-lora", "--max-lora-rank", str(max(RANKS)))
    flags += ("--max-loaded-loras", str(MAX_LOADED), "--max-loras-per-batch", str(MAX_RUNNING))
    with serving(tmp_path / "log", *flags) as server:
        state = Soak(server, folders, right)
        for name in NAMES:
            state.load(name, 0)
        state.counts.clear()
        before = open_files(server.pid)
        began = time.monotonic()
        soak(state)
        spent = time.monotonic() - began
        reported = {**state.counts, "wrong": len(state.wrong), "seconds": round(spent)}
        print(f"\n{len(NAMES)} adapters, {REQUESTS} requests: {reported}")
        assert not state.wrong, state.wrong[:5]
        assert state.counts["kills"] == KILLS and state.counts["unloaded"]
        done = state.counts["answered"] + state.counts["refused, as the adapter had left"]
        assert done == REQUESTS and state.counts["answered"] > REQUESTS / 2
        check_that_nothing_is_left(state)
        assert not state.wrong, state.wrong[:5]
        assert open_files(server.pid) <= before + CLIENTS + 2
