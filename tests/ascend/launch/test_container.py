"""The image for Ascend NPUs, and the lines of the docs that start it, as far as can be read."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from banyan.ascend.launch.facts import SOCS
from banyan.ascend.launch.files import IMAGE, devices, docker_run
from banyan.config.cli import parse
from banyan.config.env import Environment
from tests.test_repository import ROOT, instructions, rest_of

FILE = ROOT / "docker" / "npu.Dockerfile"
DOCS = ROOT / "docs" / "ascend.md"


def test_the_base_and_the_releases_are_arguments() -> None:
    words = [word for word, _ in instructions(FILE)]
    before = dict(rest.split("=") for word, rest in instructions(FILE)[: words.index("FROM")])
    assert set(before) == {"BASE", "CANN", "CHIP", "SYSTEM"}
    build, image = rest_of("FROM", FILE)
    assert build == f"{image} AS build"
    assert set(re.findall(r"\$\{(\w+)\}", image)) == set(before)
    given = {rest.split("=")[0] for rest in rest_of("ARG", FILE)} - set(before)
    used = {name for rest in rest_of("RUN", FILE) for name in re.findall(r"\$\{(\w+)\}", rest)}
    assert given == used


def test_the_image_has_the_torch_of_make_and_only_files_that_exist() -> None:
    pinned = re.search(r"^TORCH = torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned and f"TORCH={pinned[1]}" in rest_of("ARG", FILE)
    copied = [name for rest in rest_of("COPY", FILE) for name in rest.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)


def test_every_line_of_the_image_is_a_command_that_a_shell_reads() -> None:
    (shell,) = map(json.loads, rest_of("SHELL", FILE))
    for run in rest_of("RUN", FILE):
        command = re.sub(r"^--mount=\S+ ", "", run)
        done = subprocess.run([shell[0], "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_image_sets_cann_up_and_serves_with_flags_that_exist(tmp_path: Path) -> None:
    (entry,), (given,) = (map(json.loads, rest_of(word, FILE)) for word in ("ENTRYPOINT", "CMD"))
    verb, *flags = given
    config = parse(flags, Environment())
    assert (verb, config.device.name) == ("serve", "npu")
    assert rest_of("EXPOSE", FILE) == [str(config.server.port)]
    script = tmp_path / "set_env.sh"
    script.write_text("export FROM_CANN=1\n")
    program = tmp_path / "banyan"
    program.write_text('#!/bin/sh\necho "$FROM_CANN" "$@"\n')
    program.chmod(0o755)
    line = entry[2].replace("/usr/local/Ascend/ascend-toolkit/set_env.sh", str(script))
    assert line != entry[2]
    done = subprocess.run(
        [*entry[:2], line, *entry[3:], *given],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", *given]


@pytest.mark.parametrize("soc", SOCS)
def test_the_lines_of_the_docs_give_the_devices_of_the_chip(soc: str) -> None:
    found = re.search(rf"^{soc}:\n\n```sh\n(.*?)```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    command = ("serve", "--model-path /models/NAME", "--device npu", "--host 0.0.0.0")
    assert found[1] == docker_run(SOCS[soc], "/models/NAME", "banyan", command) + "\n"
    words = shlex.split(found[1].replace("\\\n", " "))
    at = words.index(IMAGE)
    pairs = list(zip(words[:at], words[1:at], strict=False))
    assert [after for word, after in pairs if word == "--device"] == list(devices(SOCS[soc]))
    assert parse(words[at + 2 :], Environment()).model.source == "/models/NAME"
    numbers = [name for name in devices(SOCS[soc]) if re.search(r"davinci\d", name)]
    assert len(numbers) == {"A2": 8, "A3": 16}[soc]
