"""Plot: TTFT, gaps and throughput of a run over time, as a picture. Needs matplotlib."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from banyan.base.errors import ConfigError
from banyan.bench.dialects import Answer
from banyan.bench.metrics import timing

_SIZE_INCHES = (10, 9)


def check_plotting() -> None:
    """Say before a long run, not after it, that no picture can be made."""
    _figure()


def draw(path: str, answers: Sequence[Answer], title: str) -> None:
    """Write the picture to `path`; its ending chooses the format.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    figure_class = _figure()
    if not answers:
        raise ConfigError("there is nothing to plot: no request completed")
    began = min(a.started for a in answers)
    timings = [timing(a) for a in answers]
    figure = figure_class(figsize=_SIZE_INCHES, layout="constrained")
    figure.suptitle(title)
    first, gaps, rate = figure.subplots(3, 1)
    sent = [a.started - began for a in answers]
    first.scatter(sent, [t.ttft * 1e3 for t in timings], s=8)
    first.set(ylabel="TTFT (ms)", xlabel="sent at (s)")
    ordered = sorted(gap * 1e3 for t in timings for gap in t.itls)
    gaps.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
    gaps.set(xlabel="inter-token latency (ms)", ylabel="share below", xscale="log")
    seconds, tokens = _tokens_by_second(answers, began)
    rate.step(seconds, tokens, where="post")
    rate.set(xlabel="time (s)", ylabel="output tokens / s")
    for axes in (first, gaps, rate):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from None


def _tokens_by_second(answers: Sequence[Answer], began: float) -> tuple[list[int], list[int]]:
    last = max(a.times[-1][0] for a in answers)
    tokens = [0] * (int(last - began) + 1)
    for answer in answers:
        had = 0
        for at, has in answer.times:
            tokens[int(at - began)] += has - had
            had = has
    return list(range(len(tokens))), tokens


def _figure() -> type[Any]:
    """matplotlib's Figure, without its state machine or a display."""
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib", hint="install it with pip install 'banyan[plot]'"
        ) from None
