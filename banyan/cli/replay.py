"""`banyan replay FILE`: runs a journal through this build's scheduler and compares every plan."""

import argparse
from collections.abc import Sequence


def replay(argv: Sequence[str]) -> int:
    """0 when every plan is reproduced, 1 at the first that differs."""
    parser = argparse.ArgumentParser(prog="banyan replay", allow_abbrev=False)
    parser.add_argument("file", help="journal written by banyan serve --journal FILE")
    parser.add_argument("--check", action="store_true", help="compare every plan (the default)")
    options = parser.parse_args(list(argv))
    from banyan.sim.replay import check

    report = check(options.file)
    print(report)
    return 0 if report.ok else 1
