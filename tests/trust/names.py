"""Tests of the security checklist, and those of a list that do not exist."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECURITY = Path(__file__).with_name("security.tsv")
"""Items of docs/security.md with the node ids of their tests."""


def checklist(table: Path = SECURITY) -> list[tuple[str, str]]:
    """(item, node id of a test) for each row of the table."""
    rows = table.read_text(encoding="utf-8").splitlines()[1:]
    return [(item, test) for item, test in (row.split("\t") for row in rows)]


def missing(targets: list[str]) -> list[str]:
    """Files, folders and node ids that do not exist."""
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
    print(" ".join(dict.fromkeys(test for _, test in checklist())))
