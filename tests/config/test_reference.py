"""The reference of the flags agrees with the tables, and each flag that works names its test."""

import ast
from functools import cache
from pathlib import Path

from banyan.cli.config import count_line, reference
from banyan.config.flags.flag import Flag
from banyan.config.flags.table import CONFIG_FILE_PROOF, GROUPS, known_flags
from banyan.config.variables import IDLE, REFUSED
from tests.support.cases import check_each

ROOT = Path(__file__).resolve().parents[2]
ALL = [flag for _, flags in GROUPS for flag in flags]
REFRESH = "run: banyan config --reference > docs/server_arguments.md"


@cache
def collected_in(path: str) -> set[str]:
    """Test functions that pytest collects from a file."""
    file = ROOT / path
    if not (file.name.startswith("test_") and file.is_relative_to(ROOT / "tests")):
        return set()
    body = ast.parse(file.read_text(encoding="utf-8")).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {n.name for n in body if isinstance(n, kinds) and n.name.startswith("test_")}


def is_collected(proof: str) -> bool:
    path, _, name = proof.partition("::")
    return (ROOT / path).is_file() and name in collected_in(path)


def test_the_page_is_what_the_tables_say() -> None:
    assert (ROOT / "docs" / "server_arguments.md").read_text() == reference(), REFRESH


def test_the_readme_tells_how_many_flags_work() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert count_line() in readme, f"the README should say: {count_line()}"


def test_a_flag_that_works_names_a_test_that_is_collected() -> None:
    def check(flag: Flag) -> None:
        assert is_collected(flag.proof), (
            f"{flag.proof or 'nothing'} is no test that pytest collects"
        )

    check_each(ALL, check, lambda flag: flag.name)


def test_the_proof_of_the_flag_file_is_collected() -> None:
    assert is_collected(CONFIG_FILE_PROOF)


def test_a_proof_that_is_gone_would_be_noticed() -> None:
    assert not is_collected("tests/config/test_file.py::test_that_never_was")
    assert not is_collected("tests/config/nowhere.py::test_json_is_understood")


def test_the_page_holds_every_flag_and_variable() -> None:
    page = reference()
    for name in (*(flag.name for flag in known_flags()),):
        assert f"`--{name}`" in page, name
    for name in (*IDLE, *REFUSED):
        assert f"`{name}`" in page, name
