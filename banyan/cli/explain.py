"""`banyan explain REQUEST-ID`: what became of a request, and why, from a flight recorder."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from banyan.cli.client import Client
from banyan.config.env import read_environment


def explain(argv: Sequence[str]) -> int:
    """Ask a running server for its recording, or take a file, and look into it here."""
    parser = argparse.ArgumentParser(
        "banyan explain",
        description="Why a request waited, what it found in the cache, where its time went.",
        allow_abbrev=False,
    )
    parser.add_argument("request", help="its id, as answers, /requests and the log say it")
    parser.add_argument("--file", default="", help="a dumped recording or journal, and no server")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--dp-rank", type=int, default=0, help="which replica had it (default: 0)")
    parser.add_argument("--api-key", default="", help="default: $BANYAN_ADMIN_API_KEY")
    options = parser.parse_args(list(argv))
    from banyan.sim.explain import explain

    if options.file:
        print(explain(options.file, options.request))
        return 0
    flags = read_environment().flags
    key = options.api_key or flags.get("admin-api-key", "") or flags.get("api-key", "")
    content = Client(options.url, key).download(f"/flight_recorder?dp_rank={options.dp_rank}")
    with tempfile.TemporaryDirectory(prefix="banyan-explain-") as folder:
        path = Path(folder) / "recording"  # nobody else reads what lies in such a folder
        path.write_bytes(content)
        print(explain(str(path), options.request))
    return 0
