"""Hints for optional packages name an extra that exists, in the form for this installation."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from banyan.base.install import DISTRIBUTION, install_command

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_a_checkout_stays_an_editable_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    start = [sys.executable, "-m", "pip", "install"]
    assert shlex.split(install_command("traces", ROOT)) == [*start, "-e", ".[traces]"]
    monkeypatch.chdir("/")
    assert shlex.split(install_command("traces", ROOT)) == [*start, "-e", f"{ROOT}[traces]"]


def test_an_installed_wheel_names_the_distribution(tmp_path: Path) -> None:
    words = shlex.split(install_command("traces", tmp_path))
    assert words[-1] == f"{DISTRIBUTION}[traces]"
    assert PROJECT["name"] == DISTRIBUTION


def test_each_extra_that_a_hint_or_a_page_names_exists() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "banyan").rglob("*.py"))
    pages = "\n".join(
        path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    )
    named = set(re.findall(r"install_command\([\"'](\w[\w-]*)", code))
    named |= set(re.findall(rf"{DISTRIBUTION}\[([\w-]+)\]", pages))
    assert len(named) > 5
    assert named <= set(PROJECT["optional-dependencies"])
    for text in (code, pages):
        assert not re.search(r"install '?\"?banyan\[", text)
