"""`banyan replay FILE`: runs a journal through this build's scheduler and compares every plan, or
sends its requests to a server once more. Constrained requests need the model's vocabulary: MODEL
and the flags of the server that recorded, after FILE."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from banyan.config.env import read_environment
from banyan.grammar.base import GrammarFactory


def replay(argv: Sequence[str]) -> int:
    """0 when every plan is reproduced, or every request answered; else 1."""
    parser = argparse.ArgumentParser(
        prog="banyan replay",
        allow_abbrev=False,
        epilog="What follows FILE is as for the server that recorded: banyan replay FILE MODEL "
        "--grammar-backend NAME. It is needed where requests were constrained.",
    )
    parser.add_argument("file", help="journal, or what a flight recorder held")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare every plan (the default)")
    what.add_argument(
        "--serve", metavar="URL", help="send the requests to this server, as they came"
    )
    parser.add_argument("--api-key", default="", help="for --serve; default: $BANYAN_API_KEY")
    options, served = parser.parse_known_args(list(argv))
    if options.serve:
        if served:
            parser.error(f"with --serve there is no {served[0]}")
        from banyan.cli.client import Client
        from banyan.cli.resend import resend

        key = options.api_key or read_environment().flags.get("api-key", "")
        resent = resend(options.file, Client(options.serve, key))
        print(resent)
        return 0 if resent.answered == resent.sent else 1
    from banyan.sim.replay import check

    with _grammars(served) as grammars:
        report = check(options.file, grammars)
    print(report)
    return 0 if report.ok else 1


@contextmanager
def _grammars(served: Sequence[str]) -> Iterator[GrammarFactory | None]:
    """What compiled the constraints of the server with these flags; None where there are none."""
    if not served:
        yield None
        return
    from banyan.config.cli import parse
    from banyan.config.prepare import prepare
    from banyan.engine.grammar_queue import open_grammars

    environment = read_environment()
    config, model_config = prepare(parse(served, environment), environment)
    compiler = open_grammars(config, model_config)
    try:
        yield compiler
    finally:
        if compiler is not None:
            compiler.close()
