"""`banyan explain REQUEST-ID`: explain what happened to a request, from a flight recorder.

`banyan cache explain REQUEST-ID` shows only the prefix cache part.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from banyan.base.errors import ConfigError
from banyan.cli.client import Client
from banyan.config.env import read_environment

if TYPE_CHECKING:  # a replay needs more than the flags
    from banyan.sim.explain import Explanation


def explain(argv: Sequence[str]) -> int:
    """What became of a request."""
    about = "Why a request waited, what it found in the cache, where its time went."
    print(_explained("banyan explain", about, argv))
    return 0


def cache(argv: Sequence[str]) -> int:
    """What it found in the prefix cache."""
    if not argv or argv[0] not in ("explain", "-h", "--help"):
        given = " ".join(["banyan cache", *argv[:1]])
        raise ConfigError(f"{given!r} is no command", hint="use: banyan cache explain REQUEST")
    about = "What a request found in the prefix cache, why no more, and what would help."
    words = argv[1:] if argv[0] == "explain" else argv
    print(_explained("banyan cache explain", about, words).of_the_cache)
    return 0


def _explained(verb: str, about: str, argv: Sequence[str]) -> "Explanation":
    """Ask a running server for its recording, or take a file, and look into it here."""
    parser = argparse.ArgumentParser(verb, description=about, allow_abbrev=False)
    parser.add_argument("request", help="its id, as answers, /requests and the log say it")
    parser.add_argument("--file", default="", help="a dumped recording or journal, and no server")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--dp-rank", type=int, default=0, help="which replica had it (default: 0)")
    parser.add_argument("--api-key", default="", help="default: $BANYAN_ADMIN_API_KEY")
    options = parser.parse_args(list(argv))
    from banyan.sim.explain import explain

    if options.file:
        return explain(options.file, options.request)
    flags = read_environment().flags
    key = options.api_key or flags.get("admin-api-key", "") or flags.get("api-key", "")
    content = Client(options.url, key).download(f"/flight_recorder?dp_rank={options.dp_rank}")
    with tempfile.TemporaryDirectory(prefix="banyan-explain-") as folder:
        path = Path(folder) / "recording"  # nobody else reads what lies in such a folder
        path.write_bytes(content)
        return explain(str(path), options.request)
