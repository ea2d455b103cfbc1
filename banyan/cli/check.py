"""`banyan check` and `banyan recipe`: check a launch on Ascend NPUs by the rules, or write one.

A launch may be for machines that are not this one, and may need features that this build lacks.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from banyan.ascend.launch.expert_rules import buffer_of
from banyan.ascend.launch.facts import (
    MODEL,
    SOCS,
    Launch,
    LaunchModel,
    arguments_of_words,
    known_model,
    read_model,
    read_variables,
    rules_page,
)
from banyan.ascend.launch.files import files_of
from banyan.ascend.launch.machine import find_soc, own_interfaces, own_packages
from banyan.ascend.launch.plan import (
    DECODE,
    PREFILL,
    SERVE,
    LaunchPlan,
    Wish,
    check_plan,
    make_plan,
)
from banyan.ascend.launch.rules import check as check_rules
from banyan.ascend.launch.rules import left_out
from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.cli import parse
from banyan.config.env import Environment, read_environment
from banyan.config.flags import outcome
from banyan.config.flags.table import find

USAGE = """banyan check [MODEL] [flags of banyan serve] [--soc A2|A3] [--env FILE] [--relaxed]
banyan check --rules

Checks a launch on Ascend NPUs against the launcher's rules: flags, variables, chip, interfaces and
the model, without starting anything. Each finding has the numbers, what to do, the rule
(docs/ascend.md) and its source.

  --soc A2|A3   the chip of the machine; default: the chip of this machine
  --env FILE    its variables, one NAME=VALUE a line; default: this process's
  --relaxed     warn only where later releases take what a rule forbids

With --soc or --env interfaces and packages of this machine are not looked at. Ends with 0 when all
rules are kept and this build would go on with the flags, with 1 when rules are broken, and with 2
when rules are kept and this build refuses a flag. --rules prints docs/ascend_rules.md instead.
"""

RECIPE_USAGE = """banyan recipe MODEL --soc A2|A3 --prefill ADDRESS,… --decode ADDRESS,… [flags]
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
BROKEN, REFUSED = 1, 2


def check(argv: Sequence[str]) -> int:
    """Print the findings; returns the exit code."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    if list(argv) == ["--rules"]:
        print(rules_page(), end="")
        return 0
    words, soc = take(list(argv), "--soc")
    words, file = take(words, "--env")
    is_relaxed = "--relaxed" in words
    words = [word for word in words if word != "--relaxed"]
    environment = read_environment(read_variables(file) if file else None)
    launch = _launch(words, soc, bool(soc or file), is_relaxed, environment)
    findings = check_rules(launch)
    for finding in findings:
        print(f"{finding.severity:<8} {finding.text}")
        print(f"{'':<8} {finding.use} [rule {finding.rule}, {finding.source}]")
    buffer = buffer_of(launch)
    if buffer is not None:
        print(f"{'buffer':<8} {buffer.line}")
    for line in left_out(launch):
        print(f"{'open':<8} {line}")
    for line in _without_effect(launch):
        print(f"{'ignored':<8} {line}")
    refusal = refusal_of(words, environment, launch.soc.name)
    if refusal:
        print(f"{'build':<8} {refusal}")
    errors = sum(finding.is_error for finding in findings)
    warned = len(findings) - errors
    print(f"{'verdict':<8} {launch.soc.name}: {errors} errors, {warned} warnings", end="")
    print("; this build does not have all that is asked for" if refusal else "")
    return BROKEN if errors else REFUSED if refusal else 0


def _launch(
    words: list[str], soc: str, is_elsewhere: bool, is_relaxed: bool, environment: Environment
) -> Launch:
    arguments = arguments_of_words(words, environment)
    name = soc or (environment.npu.soc if environment.npu.driver else find_soc())
    if name not in SOCS:
        what = (
            f"--soc {name} is no chip that rules are known for"
            if name
            else ("no Ascend NPU is seen on this machine")
        )
        raise ConfigError(what, hint=f"give --soc {' or '.join(SOCS)}")
    return Launch(
        arguments=arguments,
        variables=environment.launch,
        soc=SOCS[name],
        interfaces=None if is_elsewhere else own_interfaces(),
        packages=None if is_elsewhere else own_packages(),
        model=_model(str(arguments.get(MODEL, ""))),
        is_relaxed=is_relaxed,
    )


def _model(source: str) -> LaunchModel | None:
    found = read_model(source) if os.path.isdir(source) else None
    return found or known_model(source)


def _without_effect(launch: Launch) -> Iterator[str]:
    """A line for each flag that the start accepts without an effect on this chip."""
    for flag, value in launch.arguments.items():
        found = outcome.outcome_of(find(flag, abbreviate=False), value, launch.soc.name)
        if value is not False and found.verdict in (outcome.NOTHING, outcome.MISSING):
            yield f"--{flag}: {found.text}"


def refusal_of(words: Sequence[str], environment: Environment, soc: str) -> str:
    """The flags that this build refuses on a chip, with the reasons; "" if it starts with them."""
    try:
        parse(["--device", "npu", *words], environment)
    except ConfigError as error:
        return str(error)
    outcomes = (
        (flag, outcome.outcome_of(find(flag, abbreviate=False), value, soc))
        for flag, value in arguments_of_words(list(words), environment).items()
        if value is not False
    )
    refused = (
        f"--{flag}: {each.text}" for flag, each in outcomes if each.verdict == outcome.REFUSED
    )
    return "; ".join(refused)


def recipe(argv: Sequence[str]) -> int:
    """Print or write the files; returns the exit code."""
    if "-h" in argv or "--help" in argv or not argv:
        print(RECIPE_USAGE)
        return 0
    wish, out = _read_wish(list(argv))
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


def _read_wish(words: list[str]) -> tuple[Wish, str]:
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
        refused = refusal_of(node.words, read_environment(node.variables), plan.wish.soc.name)
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


def take(words: list[str], flag: str) -> tuple[list[str], str]:
    """The words without `flag` and its value, and that value; "" where it is not given."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != flag:
            continue
        if equals:
            return words[:at] + words[at + 1 :], value
        if at + 1 == len(words) or words[at + 1].startswith("--"):
            raise ConfigError(f"{flag} needs a value")
        return words[:at] + words[at + 2 :], words[at + 1]
    return words, ""
