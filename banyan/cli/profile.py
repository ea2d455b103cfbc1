"""`banyan profile [URL]`: record what a running server's steps do, for a while."""

import argparse
import time
from collections.abc import Sequence

from banyan.base.errors import ConfigError
from banyan.cli.client import Client
from banyan.config.env import read_environment

_HOUR_S = 3600.0


def profile(argv: Sequence[str]) -> int:
    """Start, wait, stop; prints where the server has put the file."""
    options = _parser().parse_args(list(argv))
    if not 0 < options.seconds <= _HOUR_S:
        raise ConfigError(f"--seconds must be in (0, {_HOUR_S:g}], got {options.seconds:g}")
    given = options.api_key or read_environment().flags.get("admin-api-key", "")
    client = Client(options.url, given or read_environment().flags.get("api-key", ""))
    folder = {"output_dir": options.output_dir} if options.output_dir else {}
    print(client.post("/start_profile", folder).strip(), flush=True)
    try:
        time.sleep(options.seconds)
    finally:
        print(client.post("/stop_profile", {}).strip())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "banyan profile",
        description="Record the steps of a running server. The file, on the server's machine, is "
        "for chrome://tracing or ui.perfetto.dev.",
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:30000")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument("--output-dir", default="", help="folder on the server's machine")
    parser.add_argument("--api-key", default="", help="default: $BANYAN_ADMIN_API_KEY")
    return parser
