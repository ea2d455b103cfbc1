"""Why prompts have servers of their own: `python -m benchmarks.pair_gaps [--picture FILE.svg]`.

Some streams are answered all the time. For a while nothing else happens, then prompts of 8,192
tokens come one after another. What counts is the time from one piece of a stream to the next,
next to a prefill and a decode server of one thread each, and next to one server of two threads that
does both. The picture has a point for every piece.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from random import Random

import orjson

from banyan.bench.http import HttpClient, HttpResponse
from banyan.bench.report import percentile
from benchmarks.pairs import VOCAB, alone, ask, load_average, pairs, write_model

STREAMS = 4
PROMPT = 8192
_ENDLESS = 7000
_WIDTH, _HEIGHT, _LEFT, _TOP = 760, 190, 64, 34
_COLOURS = ("#1b6e53", "#b4531f")


@dataclass(frozen=True)
class Run:
    """Pieces of all streams: (seconds since the beginning, seconds since the one before)."""

    name: str
    pieces: list[tuple[float, float]]
    quiet_s: float
    prompts: int

    def p(self, share: float, is_quiet: bool) -> float:
        """Milliseconds."""
        chosen = [gap for at, gap in self.pieces if (at < self.quiet_s) == is_quiet]
        return percentile(chosen, share) * 1e3


async def stream(server: HttpClient, number: int) -> HttpResponse:
    """A stream that goes on until its server ends."""
    lots = Random(number)
    body = {
        "input_ids": [lots.randrange(5, VOCAB) for _ in range(64)],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": _ENDLESS,
            "ignore_eos": True,
        },
        "stream": True,
    }
    return await server.request("POST", "/generate", orjson.dumps(body), timeout_s=600.0)


async def watch(name: str, url: str, quiet_s: float, busy_s: float) -> Run:
    """Streams one after another in each of STREAMS lanes, and prompts next to them in the end."""
    server, lots = HttpClient(url), Random(99)
    replies: list[HttpResponse] = []
    began_s = time.perf_counter()
    end_s = began_s + quiet_s + busy_s

    async def lane(number: int) -> None:
        while time.perf_counter() < end_s:
            replies.append(await stream(server, number))
            number += STREAMS

    lanes = [asyncio.create_task(lane(number)) for number in range(STREAMS)]
    await asyncio.sleep(quiet_s)
    prompts = 0
    while time.perf_counter() < end_s:
        await ask(server, [lots.randrange(5, VOCAB) for _ in range(PROMPT)], 2)
        prompts += 1
    await asyncio.gather(*lanes)
    server.close()
    pieces = [
        (later - began_s, later - earlier)
        for reply in replies
        for (earlier, _), (later, _) in zip(reply.pieces, reply.pieces[1:], strict=False)
        if later < end_s
    ]
    return Run(name, pieces, quiet_s, prompts)


def picture(runs: Sequence[Run], seconds: float) -> str:
    """SVG: a panel for each run, times to the right and gaps upwards (log scale)."""
    height = _TOP + len(runs) * (_HEIGHT + 46)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{_LEFT + _WIDTH + 20}" height="{height}" fill="#fff"/>',
    ]
    for at, run in enumerate(runs):
        top = _TOP + at * (_HEIGHT + 46)
        parts += _panel(run, top, seconds, _COLOURS[at % len(_COLOURS)])
    return "\n".join([*parts, "</svg>", ""])


def _panel(run: Run, top: int, seconds: float, colour: str) -> list[str]:
    figures = f"p99 {run.p(99, True):.1f} ms while quiet, {run.p(99, False):.1f} ms with prompts"
    parts = [f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{run.name}: {figures}</text>']
    for power in range(-4, 2):
        y, named = _y(top, 10.0**power), f"{10.0**power * 1e3:g} ms"
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{named}</text>'
        )
    x = _LEFT + run.quiet_s / seconds * _WIDTH
    parts.append(
        f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{top}" y2="{top + _HEIGHT}" stroke="#999" '
        f'stroke-dasharray="4 3"/><text x="{x + 5:.0f}" y="{top + 14}">from here on prompts of '
        f"{PROMPT:,} tokens come ({run.prompts})</text>"
    )
    dots = {
        (round(_LEFT + at / seconds * _WIDTH), round(_y(top, gap))): None for at, gap in run.pieces
    }
    path = "".join(f"M{x} {y}h1" for x, y in dots)
    parts.append(f'<path d="{path}" stroke="{colour}" stroke-width="1.6"/>')
    y = top + _HEIGHT + 16
    parts.append(f'<text x="{_LEFT}" y="{y}">0 s</text>')
    parts.append(f'<text x="{_LEFT + _WIDTH}" y="{y}" text-anchor="end">{seconds:g} s</text>')
    return parts


def _y(top: int, gap_s: float) -> float:
    share = (log10(min(10.0, max(1e-4, gap_s))) + 4) / 5
    return top + _HEIGHT * (1 - share)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quiet", type=float, default=15.0, help="seconds")
    parser.add_argument("--busy", type=float, default=15.0, help="seconds")
    parser.add_argument("--picture", default="", help="an SVG file to write")
    given = parser.parse_args()
    times = given.quiet, given.busy
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = write_model(folder / "model")
        print(f"{STREAMS} streams, prompts of {PROMPT:,} tokens; load before: {load_average()}")
        with pairs(model, folder, 1, 1) as url:
            shared = asyncio.run(watch("a prefill and a decode server", url, *times))
        with alone(model, folder, 2) as url:
            mixed = asyncio.run(watch("one server that does both", url, *times))
    for run in (shared, mixed):
        ratio = run.p(99, False) / max(1e-9, run.p(99, True))
        print(
            f"{run.name}: p50 {run.p(50, True):.2f} ms quiet, {run.p(50, False):.2f} ms with "
            f"{run.prompts} prompts; p99 {run.p(99, True):.2f} ms, {run.p(99, False):.2f} ms: "
            f"{ratio:.1f} times"
        )
    print(f"load after: {load_average()}")
    if given.picture:
        Path(given.picture).write_text(picture((shared, mixed), sum(times)))


if __name__ == "__main__":
    main()
