"""`banyan config [flags]`: the resolved configuration, where each value came from, the reference.

What it prints is itself a file for --config.
"""

import json
import sys
from collections.abc import Iterator, Sequence

from banyan.base.log import start_logging
from banyan.config.cli import Given, read, shown, value_of
from banyan.config.defaults import settle
from banyan.config.devices import outcome_device
from banyan.config.env import read_environment
from banyan.config.flags.table import GROUPS
from banyan.config.prepare import prepare_with_origins
from banyan.config.reference import count_line, outcome_lines, reference
from banyan.platform import open_platform
from banyan.server.http.listen import check_exposure

USAGE = """banyan config [MODEL] [flags of banyan serve]
banyan config --reference | --count

Shows the configuration that `banyan serve` would have with these flags, as a file for --config;
the origin of each value is in a comment. What `banyan serve` would refuse before it loads the
model is refused here too. The flags that do not work on the device follow, with the reasons.
--reference prints docs/server_arguments.md instead, and --count how many of the documented flags
work on each device.
"""

_ORIGIN_COLUMN = 48


def config(argv: Sequence[str]) -> int:
    """Print the configuration or the reference; returns the exit code."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    if list(argv) == ["--reference"]:
        print(reference(), end="")
        return 0
    if list(argv) == ["--count"]:
        print(count_line())
        return 0
    environment = read_environment()
    given = read(argv, environment)
    start_logging("config", "warning")
    check_exposure(given.config.server)
    resolved, model_config, rules = prepare_with_origins(given.config, environment)
    resolved, settled = settle(resolved, open_platform(resolved.device.name).defaults(model_config))
    ruled = {field: f"rule {rule}" for field, rule in rules.items()}
    origins = {**given.origins, **ruled, **settled}
    for line in _lines(Given(resolved, origins)):
        print(line)
    for line in outcome_lines(outcome_device(resolved, environment)):
        print(f"# {line}")
    for note in resolved.observe.notes:
        print(note, file=sys.stderr)
    return 0


def _lines(given: Given) -> Iterator[str]:
    for title, flags in GROUPS:
        yield f"# {title}"
        for flag in flags:
            value = shown(flag, value_of(given.config, flag))
            text = f"{flag.name}: {json.dumps(value, ensure_ascii=False)}"
            yield f"{text:<{_ORIGIN_COLUMN}} # {given.origins.get(flag.field, 'default')}"
