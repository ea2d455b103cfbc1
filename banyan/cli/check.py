"""`banyan check [flags of banyan serve]`: a launch on Ascend NPUs, held against the rules.

A plan may be for machines that are not this one, and may ask for what this build has not.
"""

import os
from collections.abc import Sequence

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
)
from banyan.ascend.launch.findings import rules_page
from banyan.ascend.launch.machine import find_soc, own_interfaces, own_packages
from banyan.ascend.launch.rules import check as check_rules
from banyan.ascend.launch.rules import left_out
from banyan.base.errors import ConfigError
from banyan.cli.own_flags import take
from banyan.config.cli import parse
from banyan.config.env import Environment, read_environment

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
    refusal = refusal_of(words, environment)
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


def refusal_of(words: Sequence[str], environment: Environment) -> str:
    """What this build says to the flags, "" when it would go on with them."""
    try:
        parse(words, environment)
    except ConfigError as error:
        return str(error)
    return ""
