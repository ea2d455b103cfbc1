"""The rules of a launch on Ascend devices: a pure function from a launch to findings."""

from collections.abc import Callable, Iterator

from banyan.ascend.launch.expert_rules import EXPERT_RULES
from banyan.ascend.launch.facts import Launch
from banyan.ascend.launch.findings import Breach, Finding, told
from banyan.ascend.launch.flag_rules import FLAG_RULES
from banyan.ascend.launch.network_rules import NETWORK_RULES
from banyan.ascend.launch.runtime_rules import RUNTIME_RULES

Rule = Callable[[Launch], Iterator[Breach]]
RULES: tuple[Rule, ...] = (*FLAG_RULES, *RUNTIME_RULES, *EXPERT_RULES, *NETWORK_RULES)
_RELAXED = ("5a",)
"""What later releases take."""
_NEED_A_MODEL = "2b 3a 3b 5b 6 9 13b 16d 17h 18a"


def check(launch: Launch) -> list[Finding]:
    """Everything that a launch does not keep, errors first; [] when all is well."""
    found = [
        told(each, is_mild=launch.is_relaxed and each.rule in _RELAXED)
        for rule in RULES
        for each in rule(launch)
    ]
    return sorted(found, key=lambda finding: not finding.is_error)


def left_out(launch: Launch) -> Iterator[str]:
    """What could not be looked at, and why."""
    if launch.model is None:
        yield f"rules {_NEED_A_MODEL.replace(' ', ', ')}: the model is not on this machine"
    elif launch.model.is_modelslim is None:
        yield "rules 3a, 3b: the model is not on this machine"
    if launch.interfaces is None:
        yield "rules 14b, 14c: the interfaces are another machine's"
    if launch.packages is None:
        yield "rule 15e: the packages are another machine's"
