"""Conversations whose prefixes outgrow the cache: what a store beside it saves, and a restart.

    python -m benchmarks.tiers [--conversations 64] [--turns 8] [--tiers all none file mooncake]
                               [--share 0.25] [--restart]

Every turn sends all of its conversation so far and some new tokens; each round of turns goes
through the conversations in another order. `all` has room for everything, the others for `--share`
of it: `none` alone, `file` with files beside it, `mooncake` with a mooncake_master that is started
here (pip install 'banyan[mooncake]'). On a CPU there is no host tier between: it would be the same
memory. With `--restart` the server is started again after half of the turns.

The hit rate is of the tokens that the turns before have sent and been answered.
"""

import argparse
import http.client
import importlib.util
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from banyan.bench.probe import probe
from benchmarks.store import serving, tokens

TIERS = ("all", "none", "file", "mooncake")
FIRST_AFTER = 100
"""Requests after a restart whose first tokens are told apart."""
_SPARE = 1.25
"""What `all` has room for, of what is kept: requests that run have pages of their own beside."""


@dataclass
class Talk:
    """One conversation."""

    number: int
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """One request: seconds to its first token, and tokens."""

    first_s: float
    cached: int
    possible: int
    """Tokens of the turns before."""
    prompt: int
    output: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first", type=int, default=512, help="new tokens of a first turn")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each other turn")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--share", type=float, default=0.25, help="of all tokens, in the cache")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--restart", action="store_true")
    args = parser.parse_args()
    longest = args.first + (args.turns - 1) * args.new + args.turns * args.answer
    total = args.conversations * longest
    print(f"{probe()}; {args.conversations} conversations of {args.turns} turns, {total:,} tokens")
    print(
        "| tier | tokens of the cache | hit rate | TTFT p50, s | TTFT p99, s | tokens/s |"
        + (f" TTFT p50 of {FIRST_AFTER} after a restart, s |" if args.restart else "")
    )
    print("|---" * (7 if args.restart else 6) + "|")
    for tier in args.tiers:
        if tier == "mooncake" and importlib.util.find_spec("mooncake") is None:
            print("mooncake is not installed: pip install 'banyan[mooncake]'")
            continue
        room = round(total * _SPARE) if tier == "all" else round(total * args.share)
        room = max(room, args.at_once * (longest + 64))
        print(line_of(args, tier, room), flush=True)


def line_of(args: argparse.Namespace, tier: str, room: int) -> str:
    """The table's line of one tier."""
    talks = [Talk(number) for number in range(args.conversations)]
    halves = [args.turns // 2, args.turns] if args.restart else [args.turns]
    found: list[list[Turn]] = []
    seconds, done = 0.0, 0
    with store_of(tier) as flags:
        for end in halves:
            words = ["--max-total-tokens", str(room), "--max-running-requests", str(args.at_once)]
            with serving(args.model, [*words, *flags]) as port:
                began = time.perf_counter()
                found.append(play(args, port, talks, range(done, end)))
                seconds += time.perf_counter() - began
                time.sleep(2.0)  # what was computed last is on its way to the store
            done = end
    turns = [turn for half in found for turn in half]
    first_s = sorted(turn.first_s for turn in turns)
    hits = sum(t.cached for t in turns) / max(1, sum(t.possible for t in turns))
    shown = [
        tier,
        f"{room:,}",
        f"{hits:.1%}",
        f"{statistics.median(first_s):.3f}",
        f"{first_s[min(len(first_s) - 1, len(first_s) * 99 // 100)]:.3f}",
        f"{sum(t.prompt + t.output for t in turns) / seconds:,.0f}",
    ]
    if args.restart:
        after = [turn.first_s for turn in found[1][:FIRST_AFTER]]
        shown.append(f"{statistics.median(after):.3f}")
    return f"| {' | '.join(shown)} |"


def play(args: argparse.Namespace, port: int, talks: list[Talk], rounds: range) -> list[Turn]:
    """These rounds of turns, some at once; each conversation in its own order."""
    found: list[Turn] = []
    for number in rounds:
        order = list(talks)
        Random(number).shuffle(order)
        with ThreadPoolExecutor(args.at_once) as pool:
            found += pool.map(lambda talk, at=number: one_turn(args, port, talk, at), order)
    return found


def one_turn(args: argparse.Namespace, port: int, talk: Talk, number: int) -> Turn:
    possible = len(talk.ids)
    new = tokens(args.new if number else args.first, 7919 * talk.number + number + 1)
    talk.ids += new
    first_s, meta, output = stream(port, talk.ids, args.answer)
    prompt = len(talk.ids)
    talk.ids += output
    return Turn(first_s, meta["cached_tokens"], possible, prompt, len(output))


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


@contextmanager
def store_of(tier: str) -> Iterator[list[str]]:
    """The flags of a tier, whose pages are removed at the end."""
    if tier not in ("file", "mooncake"):
        yield []
        return
    words = ["--enable-hierarchical-cache", "--hicache-storage-backend", tier]
    if tier == "mooncake":
        from tests.transfer.outside import mooncake

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
