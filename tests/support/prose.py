"""Sentences of the pages: how long they are.

python -m tests.support.prose [PAGE…]      prints the mean of each page and its long sentences
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.vocabulary import ROOT

MEAN = 20.0
"""Words of a sentence of running text, the mean of a page."""
LONGEST = 40
"""Words of one sentence, cells of tables included."""

_NEW_BLOCK = re.compile(r"\s*([-*+>] |\d+[.)] |#|\|)")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+")
_SHORT = re.compile(r"\b(e\.g|i\.e|vs|approx|incl|No)\.", re.IGNORECASE)


def sentences(text: str, has_cells: bool = True) -> Iterator[str]:
    """Sentences of paragraphs, list items and (`has_cells`) cells of tables, without code and
    headings."""
    blocks: list[str] = []
    is_code = is_joined = False
    for row in text.split("\n"):
        if row.lstrip().startswith("```"):
            is_code, is_joined = not is_code, False
        elif is_code or (row.startswith("    ") and not is_joined) or not row.strip():
            is_joined = False
        elif row.lstrip().startswith("|"):
            blocks += re.split(r"(?<!\\)\|", row) if has_cells else []
            is_joined = False
        elif row.startswith("#") or row.lstrip().startswith("<"):
            is_joined = False
        elif is_joined and not _NEW_BLOCK.match(row):
            blocks[-1] += " " + row.strip()
        else:
            blocks.append(row.strip())
            is_joined = True
    for block in blocks:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "`x`", block))
        for sentence in _END.split(_SHORT.sub(r"\1", plain)):
            if re.search(r"[a-z]{2}", sentence or "") and words(sentence) > 2:
                yield sentence.strip()


def words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def measure(page: Path) -> tuple[float, list[str]]:
    """Mean words of a sentence, and the sentences above the longest that is allowed."""
    text = page.read_text(encoding="utf-8")
    lengths = [words(sentence) for sentence in sentences(text, has_cells=False)]
    long = [sentence for sentence in sentences(text) if words(sentence) > LONGEST]
    return sum(lengths) / max(1, len(lengths)), long


if __name__ == "__main__":
    named = [Path(name).resolve() for name in sys.argv[1:]]
    for page in named or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        mean, long = measure(page)
        print(f"{mean:5.1f} {len(long):4} {page.relative_to(ROOT)}")
        for sentence in long if named else []:
            print(f"      {words(sentence)}: {sentence}")
