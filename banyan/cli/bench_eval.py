"""`banyan bench eval`: asks servers, or starts one for each set of flags that is named."""

import asyncio
import shlex
from collections.abc import Sequence
from contextlib import ExitStack

from banyan.base.errors import ConfigError
from banyan.bench.evals import Asking, ask_all, own_questions, read_questions, results, score_table
from banyan.bench.options import EvalOptions, split_options
from banyan.cli.bench import keep, progress_bar
from banyan.cli.private import private_server


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
    asking = Asking(options.model_name, settings, options.max_concurrency, options.timeout_s)
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
