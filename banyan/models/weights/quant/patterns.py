"""Which modules of a checkpoint a setting is for: by name, by pattern, or all of them.

Patterns come with the checkpoint, so they are bounded: what could take for ever is refused.
"""

import re
from collections.abc import Sequence

from banyan.base.errors import ModelError
from banyan.base.log import printable

_MAX_PATTERN = 512
_NESTED = re.compile(r"[*+}]\??\)+[*+{]")
"""A repeated group that ends with a repetition: the kind that can take exponential time."""


def pattern(text: str, where: str) -> re.Pattern[str]:
    """A regular expression of the checkpoint; ModelError when it is none, or may take too long."""
    if len(text) > _MAX_PATTERN or _NESTED.search(text):
        raise ModelError(
            f"{printable(where)}: the pattern {printable(text, 80)!r} may take too long",
            hint=f"patterns have at most {_MAX_PATTERN} characters and repeat no repetition",
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError):
        raise ModelError(
            f"{printable(where)}: {printable(text, 80)!r} is no regular expression"
        ) from None


class Modules:
    """
    Args:
        targets: "re:…" = a pattern at the start of a module's name, "a.b" = its name, "Linear" =
            the class of them all.
    """

    def __init__(self, targets: Sequence[str], where: str) -> None:
        self.classes = [name for name in targets if name[:1].isupper() and "." not in name]
        self.names = {name for name in targets if not name.startswith("re:")}
        self.patterns = [pattern(t.removeprefix("re:"), where) for t in targets if t[:3] == "re:"]

    def names_it(self, module: str) -> bool:
        """Whether a name or a pattern means this module."""
        return module in self.names or any(each.match(module) for each in self.patterns)
