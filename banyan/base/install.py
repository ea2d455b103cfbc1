"""The version, and commands that install optional packages, for the hints of error messages."""

import shlex
import sys
from pathlib import Path

VERSION = "0.1.0"
DISTRIBUTION = "banyan-serve"
"""Name on the package index. The package of the name "banyan" there is another program."""
SOURCE = Path(__file__).resolve().parents[2]
"""Folder that contains the package: a checkout, or site-packages."""


def install_command(extra: str, source: Path = SOURCE) -> str:
    """Command that installs the packages of an extra of pyproject.toml for this interpreter.

    A checkout names its own folder, so that an editable installation stays one; an installed wheel
    names the distribution.
    """
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    if not (source / "pyproject.toml").is_file():
        return f"{pip} '{DISTRIBUTION}[{extra}]'"
    folder = "." if source == Path.cwd() else str(source)
    return f"{pip} -e {shlex.quote(f'{folder}[{extra}]')}"
