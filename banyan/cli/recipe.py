"""`banyan recipe MODEL`: what to run on each of several machines with Ascend NPUs."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from banyan.ascend.launch.facts import SOCS
from banyan.ascend.launch.files import files_of
from banyan.ascend.launch.plan import LaunchPlan, Wish, check_plan, make_plan
from banyan.ascend.launch.recipes import DECODE, PREFILL, SERVE
from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.cli.check import refusal_of
from banyan.cli.own_flags import take
from banyan.config.env import read_environment

USAGE = """banyan recipe MODEL --soc A2|A3 --prefill ADDRESS,… --decode ADDRESS,… [flags]
banyan recipe MODEL --soc A2|A3 --serve ADDRESS,… [flags]

Variables and a command line for each machine, a docker run line for each, a compose file and
Kubernetes manifests. MODEL is the folder of the weights, the same on every machine. DeepSeek V3.2,
V3 and R1 have the recipes of the documents (docs/ascend.md), with servers of prompts and servers of
answers; every other model is served over all devices.

  --soc A2|A3         the chip: 8 or 16 devices a machine
  --prefill, --decode, --serve ADDRESS,…
                      addresses of the machines, grouped by instance
  --interface NAME    the network interface that reaches the other machines
  --out FOLDER        write the files there instead of printing them

The plan is checked with the rules of `banyan check` for each machine. Findings and what this build
refuses go to standard error.
"""


def recipe(argv: Sequence[str]) -> int:
    """Print or write the files; returns the exit code."""
    if "-h" in argv or "--help" in argv or not argv:
        print(USAGE)
        return 0
    wish, out = _read(list(argv))
    plan = make_plan(wish)
    for line in dict.fromkeys(_remarks(plan)):
        print(line, file=sys.stderr)
    errors = [finding for _, finding in check_plan(plan) if finding.is_error]
    if errors:
        raise ConfigError(
            "this plan breaks rules of Ascend NPUs: " + "; ".join(e.line for e in errors)
        )
    files = files_of(plan)
    for name, text in files.items():
        if out:
            _write(Path(out), name, text)
        else:
            print(f"# file: {name}\n{text}")
    if out:
        print(f"{len(files)} files in {out}: {', '.join(files)}")
    return 0


def _read(words: list[str]) -> tuple[Wish, str]:
    words, soc = take(words, "--soc")
    words, interface = take(words, "--interface")
    words, out = take(words, "--out")
    nodes: dict[str, Sequence[str]] = {}
    for role in (PREFILL, DECODE, SERVE):
        words, text = take(words, f"--{role}")
        nodes[role] = _addresses(role, text)
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"banyan recipe takes one model, got {words}", hint="see --help")
    if soc not in SOCS:
        what = f"no chip is called {printable(soc, 20)}" if soc else "no chip is named"
        raise ConfigError(what, hint=f"give --soc {' or '.join(SOCS)}")
    return Wish(words[0], SOCS[soc], nodes, interface), out


def _addresses(role: str, text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    for address in found:
        if not address.replace(".", "").replace("-", "").isalnum():
            raise ConfigError(f"--{role}: {printable(address, 60)!r} is no address of a machine")
    twice = next((a for a in found if found.count(a) > 1), "")
    if twice:
        raise ConfigError(f"--{role} names {twice} twice", hint="each machine has one part")
    return found


def _remarks(plan: LaunchPlan) -> Iterator[str]:
    """What the files leave to their reader, warnings of the rules, and what this build refuses;
    once for machines of one role."""
    if len(plan.nodes) > 1:
        yield (
            "to be added: BANYAN_DIST_SECRET, the same long random text in each machine's .env; "
            "who knows it is let in"
        )
    for node, finding in check_plan(plan):
        if not finding.is_error:
            yield f"warning: {node.role}: {finding.line}"
    for node in plan.nodes:
        refused = refusal_of(node.words, read_environment(node.variables))
        if refused:
            yield f"this build does not start it yet: {node.role}: {refused}"


def _write(folder: Path, name: str, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {folder / name}: {error.strerror}") from None
    if name.endswith(".sh"):
        (folder / name).chmod(0o755)
