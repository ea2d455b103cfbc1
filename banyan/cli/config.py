"""`banyan config [flags]`: the resolved configuration, where each value came from, the reference.

What it prints is itself a file for --config. The reference is docs/server_arguments.md.
"""

import json
import sys
from collections.abc import Iterator, Sequence

from banyan.base.log import start_logging
from banyan.config import variables
from banyan.config.cli import Given, default_of, read, shown, value_of
from banyan.config.defaults import settle
from banyan.config.devices import outcome_device
from banyan.config.env import read_environment
from banyan.config.flags.flag import BELONGS, IDLE, REFUSED, SWITCH, Absent, Flag
from banyan.config.flags.outcome import (
    DEVICES,
    VERDICTS,
    WORKS,
    Outcome,
    counts,
    differing,
    outcome_of,
    outcome_rows,
)
from banyan.config.flags.table import CONFIG_FILE, GROUPS, REPLACED, known_flags
from banyan.config.prepare import prepare_with_origins
from banyan.config.schema import UNSAID
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


_NAME_COLUMN = 44

_HEAD = """# Server arguments

Every flag and environment variable of `banyan serve`. `banyan config --reference` prints this page.

Flags can be given in three places:

- on the command line of `banyan serve` and `python -m banyan.launch_server`;
- as environment variables: `--page-size` is `BANYAN_PAGE_SIZE`;
- in a YAML file (`--config FILE`), with dashes or underscores. Unknown keys are errors.

The command line overrides variables, and variables override files; later files override earlier
ones. `banyan config` with the same flags prints the resulting values and where each comes from.

"""

_DIFFERENCES = """## Defaults that differ from SGLang's

| flag | here | SGLang |
|---|---|---|
| `--mem-fraction-static` | not set: the cache takes a quarter of the free memory | 0.7 to 0.9 |
| `--chunked-prefill-size` | 512 | 2,048 to 16,384, by the device |
| `--max-running-requests` | at most 128 | by the cache |
| `--page-size` | 16 | 1, on Ascend 128 |
| `--kv-cache-dtype` | fp16 if kernels quantize activations, else the model's | the model's |
| `--num-continuous-decode-steps` | 8 if steps are recorded and no other flag prevents it | 1 |
| `--tool-call-parser`, `--reasoning-parser` | detected from the chat template | none |
"""


_DEVICE_NAMES = {"cpu": "CPU", "cuda": "CUDA GPU", "A2": "Ascend A2", "A3": "Ascend A3"}


def count_line() -> str:
    """Number of server arguments that work on each device; the README has this sentence too."""
    works = {device: counts(device)[WORKS] for device in DEVICES}
    assert works["A2"] == works["A3"]
    return (
        f"Of SGLang's {counts(DEVICES[0]).total()} documented server arguments, {works['cpu']} "
        f"work on CPUs, {works['cuda']} on CUDA GPUs and {works['A3']} on Ascend NPUs. A log line "
        "explains every other one."
    )


def outcome_lines(device: str) -> Iterator[str]:
    """For `banyan config`: the counts of a device, and a line for each flag that does not work."""
    found = counts(device)
    verdicts = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS)
    yield f"Documented flags on {device}: {verdicts}"
    for flag, outcome in differing(device):
        yield f"{flag:<{_NAME_COLUMN}}  {outcome.text}"


def reference() -> str:
    """The whole page."""
    return "\n".join(
        [
            _HEAD + count_line() + "\n",
            *_by_device(),
            *_each_flag(),
            *_working(),
            *_accepted("Ignored flags: nothing to do", IDLE),
            *_accepted("Ignored flags: missing feature", BELONGS),
            *_refused(),
            *_replaced(),
            *_variables(),
            _DIFFERENCES,
        ]
    )


def _by_device() -> Iterator[str]:
    yield "## Flags by device\n"
    yield "Documented flags with each outcome:\n"
    yield from _table("device", *VERDICTS)
    for device in DEVICES:
        found = counts(device)
        yield from _row(_DEVICE_NAMES[device], *(str(found[verdict]) for verdict in VERDICTS))
    yield ""
    yield "*Missing*: the flag is accepted, and tunes a feature that is absent. *Refused*: it ends"
    yield "the start. These outcomes depend on the device; the sections below have all others.\n"
    yield from _table("flags", "values", "device", "outcome", "why", "what to use")
    groups: dict[tuple[object, ...], list[str]] = {}
    for known in known_flags():
        for row in outcome_rows().get(known.name, ()):
            key = (" ".join(row.values), ", ".join(row.devices), row.outcome)
            groups.setdefault(key, []).append(known.name)
    for (values, devices, outcome), flags in groups.items():
        assert isinstance(outcome, Outcome)
        given = f"`{_shortened(str(values))}`" if values else ""
        cells = (outcome.verdict, outcome.why, outcome.use)
        yield from _row(_names(*flags), given, str(devices), *cells)
    yield ""


def _each_flag() -> Iterator[str]:
    """A table of the outcome of each documented flag on each device."""
    yield "## Each documented flag by device\n"
    yield from _table("flag", *(_DEVICE_NAMES[device] for device in DEVICES))
    for known in known_flags():
        if known.documented:
            verdicts = (outcome_of(known, None, device).verdict for device in DEVICES)
            yield from _row(_names(known.name), *verdicts)
    yield ""


def _working() -> Iterator[str]:
    yield "## Flags that work\n"
    yield f"`--{CONFIG_FILE} FILE` names a YAML or JSON file of flags.\n"
    for title, flags in GROUPS:
        yield f"### {title}\n"
        yield from _table("flag", "value", "default", "meaning")
        for flag in flags:
            yield from _row(
                _names(flag.name, *flag.aliases, *flag.old),
                f"`{_cell(flag.metavar)}`" if flag.metavar else "",
                _default(flag),
                flag.help,
            )
        yield ""


def _accepted(title: str, outcome: str) -> Iterator[str]:
    yield f"## {title}\n"
    yield "Accepted with a log line. Invalid values are still errors.\n"
    yield from _table("flags", "why")
    for (why, _), flags in _by_reason(outcome).items():
        yield from _row(", ".join(_names(flag.name, *flag.aliases) for flag in flags), why)
    yield ""


def _refused() -> Iterator[str]:
    yield "## Refused flags\n"
    yield "The value in brackets is accepted, and so is a switch set to false.\n"
    yield from _table("flags", "why", "what to use")
    for (why, use), flags in _by_reason(REFUSED).items():
        names = [_names(flag.name, *flag.aliases) + _neutral(flag) for flag in flags]
        yield from _row(", ".join(names), why, use)
    yield ""


def _replaced() -> Iterator[str]:
    yield "## Old names\n"
    yield from _table("flag", "read as")
    for flag in REPLACED:
        yield from _row(_names(flag.name), f"`--{flag.successor} {flag.value}`")
    for _, flags in GROUPS:
        for flag in flags:
            for old in flag.old:
                yield from _row(_names(old), f"`--{flag.name}`")
    yield ""


def _variables() -> Iterator[str]:
    yield "## Environment variables\n"
    yield "Every flag can be set as `BANYAN_<FLAG>`. These other variables have an effect:\n"
    for name in (*variables.HONOURED, *variables.LIBRARIES):
        meaning = f": {variables.SETTINGS[name].help}" if name in variables.SETTINGS else ""
        yield f"- `{name}`{meaning}"
    for name, meaning in variables.READ.items():
        yield f"- `{name}`: {meaning}"
    yield "\nRefused if set:\n"
    yield from _table("variable", "why", "what to use")
    for name, refusal in variables.REFUSED.items():
        yield from _row(f"`{name}`", refusal.why, refusal.use)
    yield "\nIgnored with a log line:\n"
    yield from _table("variable", "why")
    for name, why in variables.IDLE.items():
        yield from _row(f"`{name}`", why)
    yield ""


def _by_reason(outcome: str) -> dict[tuple[str, str], list[Absent]]:
    """(why, what to use) -> absent flags."""
    found: dict[tuple[str, str], list[Absent]] = {}
    for flag in known_flags():
        if isinstance(flag, Absent) and flag.outcome == outcome:
            found.setdefault((flag.why, flag.use), []).append(flag)
    return found


def _shortened(values: str) -> str:
    """Long lists of values are cut: the first ones, and how many follow."""
    words = values.split()
    return values if len(words) <= 8 else f"{' '.join(words[:4])} … ({len(words)} values)"


def _neutral(flag: Absent) -> str:
    return f" ({', '.join(f'`{value}`' for value in flag.neutral)})" if flag.neutral else ""


def _names(*names: str) -> str:
    return ", ".join(f"`--{name}`" for name in names)


def _default(flag: Flag) -> str:
    default = default_of(flag)
    if flag.kind == SWITCH:
        return "off"
    is_described = "default:" in flag.help
    if default in ("", (), {}) or (default in (0, UNSAID) and (flag.low > 0 or is_described)):
        return ""
    return f"`{default}`"


def _table(*titles: str) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"


def _row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
