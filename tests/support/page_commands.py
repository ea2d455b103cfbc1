"""Command lines in the code blocks of a page, and the simple commands in each of them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:(?:\S*/)?(?:banyan|python3?|pip)|make|curl|echo|docker|git|kubectl|helm) "
)
_BETWEEN = ("&&", "|", "&", ">", ";")


def commands(page: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of each command in the code blocks of a page."""
    is_fenced, parts, start = False, [], 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            is_fenced = not is_fenced
            continue
        code = line if is_fenced else line[4:] if line.startswith("    ") else ""
        start = start if parts else number
        parts.append(code.strip().removesuffix("\\").removeprefix("$ "))
        text = " ".join(parts)
        if code.rstrip().endswith("\\") or (is_open(text) and code):
            continue
        if COMMAND.match(text + " "):
            yield start, text
        parts = []


def is_open(text: str) -> bool:
    """Whether a quote goes on in the next line."""
    return bool(COMMAND.match(text)) and text.count("'") % 2 == 1


def programs(text: str) -> Iterator[list[str]]:
    """The simple commands of a line of shell, without redirections and variables before them."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&|>;")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    skips = False
    for word in lexer:
        if word in _BETWEEN:
            skips = word == ">"
            if not skips and words:
                yield words
                words = []
        elif skips:
            skips = False
        elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
            words.append(word)
    if words:
        yield words
