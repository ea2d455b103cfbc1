"""`banyan replay FILE`: runs a journal through this build's scheduler and compares every plan, or
sends its requests to a server once more."""

import argparse
from collections.abc import Sequence

from banyan.config.env import read_environment


def replay(argv: Sequence[str]) -> int:
    """0 when every plan is reproduced, or every request answered; else 1."""
    parser = argparse.ArgumentParser(prog="banyan replay", allow_abbrev=False)
    parser.add_argument("file", help="journal, or what a flight recorder held")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare every plan (the default)")
    what.add_argument(
        "--serve", metavar="URL", help="send the requests to this server, as they came"
    )
    parser.add_argument("--api-key", default="", help="for --serve; default: $BANYAN_API_KEY")
    options = parser.parse_args(list(argv))
    if options.serve:
        from banyan.cli.client import Client
        from banyan.cli.resend import resend

        key = options.api_key or read_environment().flags.get("api-key", "")
        resent = resend(options.file, Client(options.serve, key))
        print(resent)
        return 0 if resent.answered == resent.sent else 1
    from banyan.sim.replay import check

    report = check(options.file)
    print(report)
    return 0 if report.ok else 1
