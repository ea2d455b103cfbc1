"""House words: words in a private sense that code, messages and pages do not use.

    python -m tests.support.vocabulary [PATH…]     prints where they stand, by file and line
    python -m tests.support.vocabulary --count     prints how many there are in each package

docs/architecture.md has the glossary: the field's words, with the names that the code gives them.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs")

PROSE = re.compile(
    r"\b(told|tells?|telling|hears?|heard|beside|behind|whoever|whomever|nought|shall"
    r"|those of|that of|of which|of whom|makes of|goes with|go with|goes together|go together"
    r"|stands(?! for)|knows no|knows nothing|must not know)\b",
    re.IGNORECASE,
)
"""In docstrings, comments, messages and pages."""
ALLOWED = re.compile(
    r"look-behind|behind (a|an|the|another|your|its own)? ?(reverse |load |TLS )?"
    r"(prox(y|ies)|balancers?|router|gateway|load balancer|ingress|firewall|nginx|NAT)\b"
    r"|\btell me\b",
    re.IGNORECASE,
)
"""The field's own uses, and prompts."""
IDENTIFIERS = frozenset(
    [
        "told",
        "tell",
        "tells",
        "hear",
        "hears",
        "heard",
        "says",
        "beside",
        "behind",
        "nought",
        "whoever",
        "roster",
        "sheet",
        "seat",
        "seats",
        "rack",
        "holdings",
        "crew",
        "onlooker",
        "workshop",
        "bell",
        "hurry",
        "burst",
        "bursts",
        "giver",
        "taker",
        "shelf",
        "shelves",
        "card",
        "cards",
        "duty",
        "standing",
        "joined",
        "joint",
        "lockstep",
        "trail",
        "trails",
        "narrows",
        "horizon",
        "stamp",
        "roster",
    ]
)
"""As parts of names of classes, functions, fields and variables."""
FILE_POSITION = re.compile(r"\bfile\.tell\(\)|def tell\(self\) -> int")
"""Python's own method of files."""


def words_of(name: str) -> set[str]:
    """The words that a name in snake_case or CamelCase consists of, in lower case."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def in_prose(text: str, line: int) -> Iterator[tuple[int, str]]:
    """(line, phrase) of each house word in a text that begins at `line`."""
    for number, row in enumerate(text.split("\n"), line):
        cleaned = ALLOWED.sub("", row)
        yield from ((number, match.group()) for match in PROSE.finditer(cleaned))


def in_code(source: str) -> Iterator[tuple[int, str]]:
    """(line, word) in a Python file: prose of docstrings, comments and messages, and names."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from in_prose(node.value, node.lineno)
    if not words_of(source) & IDENTIFIERS and not PROSE.search(source):
        return  # to split a file into tokens takes long
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from in_prose(token.string, token.start[0])
        elif FILE_POSITION.search(token.line) and token.string == "tell":
            continue
        elif token.type == tokenize.NAME and (found := words_of(token.string) & IDENTIFIERS):
            yield token.start[0], f"{token.string} ({', '.join(sorted(found))})"


def in_page(text: str) -> Iterator[tuple[int, str]]:
    """(line, phrase) in a page of documentation, outside of code."""
    is_code = False
    for number, row in enumerate(text.split("\n"), 1):
        if row.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield from in_prose(re.sub(r"`[^`]*`", "", row), number)


def files(paths: Iterable[str] = ("banyan", *PAGES)) -> Iterator[Path]:
    for path in map(ROOT.joinpath, paths):
        if path.is_dir():
            yield from sorted(f for f in path.rglob("*") if f.suffix in (".py", ".md"))
        else:
            yield path


def house_words(file: Path) -> list[tuple[int, str]]:
    text = file.read_text(encoding="utf-8")
    return list(in_page(text) if file.suffix == ".md" else in_code(text))


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if not word.startswith("--")]
    counts: Counter[str] = Counter()
    for file in files(named or ("banyan", *PAGES)):
        name = file.relative_to(ROOT)
        for line, word in house_words(file):
            counts["/".join(name.parts[:2])] += 1
            if "--count" not in sys.argv:
                print(f"{name}:{line}: {word}")
    for package, count in counts.most_common():
        print(f"{count:6} {package}")
    print(f"{counts.total():6} in all")
