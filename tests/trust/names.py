"""The tests that a page or a table names, and which of them do not exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECURITY = ROOT / "docs" / "security.md"


def named_in(page: Path) -> list[str]:
    """Node ids in a page's code marks, each once, in their order."""
    found = re.findall(r"`(tests/[\w/]+\.py::\w+)`", page.read_text(encoding="utf-8"))
    return list(dict.fromkeys(found))


def missing(targets: list[str]) -> list[str]:
    """Those of these files, folders and node ids that do not exist."""
    return [target for target in targets if not _exists(target)]


def _exists(target: str) -> bool:
    path, _, name = target.partition("::")
    return (ROOT / path).exists() and (not name or name in _tests(ROOT / path))


@cache
def _tests(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in nodes if isinstance(node, kinds))


if __name__ == "__main__":
    print(" ".join(named_in(SECURITY)))
