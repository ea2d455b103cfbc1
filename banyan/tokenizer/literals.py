"""One pattern for many literal texts, longest first. Its time does not grow with their number."""

import re
from collections.abc import Collection
from itertools import groupby
from os.path import commonprefix


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern for the longest of `texts` at the leftmost position; without texts it never
    matches."""
    return re.compile(_branches(sorted(set(texts))) if texts else r"(?!)")


def _branches(texts: list[str]) -> str:
    """The texts (sorted, distinct) as a tree of common prefixes."""
    start = commonprefix([texts[0], texts[-1]])
    rest = [text[len(start) :] for text in texts]
    ends_here = rest[0] == ""
    groups = [_branches(list(g)) for _, g in groupby(rest[ends_here:], key=lambda text: text[0])]
    if not groups:
        return re.escape(start)
    return f"{re.escape(start)}(?:{'|'.join(groups)}){'?' if ends_here else ''}"
