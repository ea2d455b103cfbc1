"""Every command line of README and docs/ is one that its program takes.

Flags are read by the readers of the verbs, so that a misspelled or removed one fails here. Routes,
make targets, extras, modules and tests that a page names exist. `ELSEWHERE` lists what needs other
machines.
"""

import ast
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from banyan.bench import options
from banyan.cli.bench import KINDS
from banyan.cli.main import VERBS
from banyan.cli.plan import PlanOptions
from banyan.cli.quantize import QuantizeOptions
from banyan.cli.router import LB, read_flags
from banyan.cli.serve import several_models
from banyan.cli.simulate import SimulateOptions
from banyan.cli.verify import VerifyOptions
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.router.routes import all_routes as router_routes
from banyan.server.routes import all_routes as server_routes
from tests.support.page_commands import commands, programs

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
ELSEWHERE = {
    "docker": "needs a registry of images",
    "kubectl": "needs a cluster",
    "helm": "needs a cluster; tests/deploy/test_chart.py renders the chart",
    "git": "needs the repository's address",
}
"""Programs whose commands are not tried here -> why."""
ENVIRONMENT = Environment(flags={"api-key": "k"})


CASES = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, text in commands(page)
]


def served(words: Sequence[str]) -> None:
    given = [word for word in words if word not in ("…", "[flags", "of", "banyan", "serve]")]
    if several := several_models(given):
        read_flags(several, ENVIRONMENT.flags, lambda flags: parse(flags, ENVIRONMENT))
    else:
        parse(given, ENVIRONMENT)


def split(kind: type, words: Sequence[str]) -> list[str]:
    return options.split_options(kind, list(words), "banyan", "")[1]


def routed(words: Sequence[str]) -> None:
    read_flags(named(words), ENVIRONMENT.flags, served)


def named(words: Sequence[str]) -> list[str]:
    """With an address for each word that stands for one."""
    words = [word for number, word in enumerate(words) if word != "…" or words[number - 1] != "URL"]
    return [f"http://h{n}:1" if word in ("…", "URL") else word for n, word in enumerate(words)]


def benched(words: Sequence[str]) -> None:
    kinds = {"batch": options.BatchOptions, "throughput": options.ThroughputOptions}
    kinds |= {"eval": options.EvalOptions}
    assert words[0] in KINDS
    if words[0] == "serving":
        options.read_options(options.ServingOptions, words[1:], "banyan", "")
    else:
        served(split(kinds[words[0]], words[1:]))


def talked(words: Sequence[str]) -> None:
    from banyan.cli.chat import _parser

    served(_parser().parse_known_args(list(words))[1])


def nothing(words: Sequence[str]) -> None:
    assert all(word.isalnum() or not word.startswith("--") for word in words)


READERS: dict[str, Callable[[Sequence[str]], object]] = {
    "serve": served,
    "config": served,
    "batch": lambda words: served(words[2:]),
    "plan": lambda words: served(split(PlanOptions, words)),
    "simulate": lambda words: served(split(SimulateOptions, words)),
    "verify": lambda words: served(split(VerifyOptions, words)),
    "quantize": lambda words: served(split(QuantizeOptions, words)[2:]),
    "router": routed,
    "bench": benched,
    "chat": talked,
    "run": lambda words: talked(words[:1]),
    "models": nothing,
    "doctor": lambda words: nothing([w for w in words if w != "--device"]),
    "npu-selfcheck": nothing,
}
"""Verb -> what reads its words; the others are read by argparse or by hand, when they run."""
BY_HAND = ("check", "recipe", "explain", "cache", "replay", "profile", "lora")


def check_banyan(words: list[str]) -> None:
    verb = words[0]
    assert verb in VERBS
    if verb in READERS:
        READERS[verb](words[1:])
    else:
        assert verb in BY_HAND
        text = next(
            source
            for source in map(Path.read_text, (ROOT / "banyan" / "cli").glob("*.py"))
            if f"def {verb}(" in source
        )
        for word in words:
            if word.startswith("--") and verb not in ("check", "recipe"):
                assert f'"{word}"' in text, word


def check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for target in words:
        if "=" not in target:
            assert re.search(rf"^{re.escape(target.replace('.venv', '$(VENV)'))}:", text, re.M), (
                target
            )


def check_curl(words: list[str]) -> None:
    url = next(w for w in words if re.match(r"(https?://)?[\w.]*:\d+/|/", w))
    path = "/" + re.sub(r"^(https?://)?[^/]*/", "", url)
    named_method = words[words.index("-X") + 1] if "-X" in words else ""
    method = named_method or ("POST" if {"-d", "-F"} & {*words} else "GET")
    table = router_routes() if url.startswith(":8080") else server_routes()
    paths = {p: m for route in table for p, m in route.places().items()}
    fitting = [m for p, m in paths.items() if re.fullmatch(pattern_of(p), path)]
    assert any(method in methods for methods in fitting), (method, path)
    if "-d" in words and not (body := words[words.index("-d") + 1]).startswith("$"):
        assert isinstance(json.loads(body), dict)


def pattern_of(path: str) -> str:
    """Regular expression of the paths of a route; one that ends in "/" has everything below it."""
    pattern = re.sub(r"\{\w+\}", "[^/]+", path)
    return f"{pattern}.*" if path.endswith("/") and path != "/" else pattern


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        if extra := re.search(r"\[(.+)\]$", word):
            assert extra[1] in project["optional-dependencies"]
        elif word.startswith("./"):
            assert (ROOT / word / "pyproject.toml").exists()


def check_python(words: list[str]) -> None:
    if words[0] != "-m":
        assert (ROOT / words[0]).exists()
        return
    module, rest = words[1], words[2:]
    if module == "banyan":
        check_banyan(rest)
    elif module == "pip":
        check_pip(rest)
    elif module == "pytest":
        for word in rest:
            if word.startswith("tests"):
                file, _, name = word.partition("::")
                assert (ROOT / file).exists(), file
                tree = ast.parse((ROOT / file).read_text()) if name else None
                assert tree is None or any(
                    isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body
                )
    elif module == "banyan.launch_lb":
        read_flags(named(rest), {}, served, LB)
    elif module.startswith("sglang"):
        served(rest)
    else:
        assert importlib.util.find_spec(module) is not None, module


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "banyan": check_banyan,
    "make": check_make,
    "curl": check_curl,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "echo": lambda words: None,
    "cd": lambda words: None,
}


@pytest.mark.parametrize("text", CASES)
def test_a_command_of_a_page_is_one_that_its_program_takes(text: str) -> None:
    for words in programs(text):
        name = Path(words[0]).name
        if name in ELSEWHERE:
            continue
        CHECKS[name](words[1:])


@pytest.mark.parametrize(
    "text",
    [
        "banyan serve demo --prot 1",
        "banyan bench serving --num-prompt-s 3",
        "banyan explain 12 --ulr x",
        "make serv",
        "curl http://127.0.0.1:30000/v1/chat/completion -d '{}'",
        "curl http://127.0.0.1:30000/generate -d '[1]'",
        "pip install 'banyan-serve[matrics]'",
        "python -m pytest tests/no_such_file.py",
        "python -m benchmarks.no_such_module",
    ],
)
def test_a_mistake_on_a_page_would_be_found(text: str) -> None:
    with pytest.raises(Exception):  # noqa: B017
        test_a_command_of_a_page_is_one_that_its_program_takes(text)


def test_commands_are_found_over_several_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n    banyan serve M \\\n      --tp 2   # two\n\n"
        "    curl :1/generate -d '{\n      \"a\": 1}'\n    result line\n"
    )
    assert [text for _, text in commands(page)] == [
        "banyan serve M  --tp 2   # two",
        "curl :1/generate -d '{ \"a\": 1}'",
    ]
    assert list(programs("A=1 banyan x > y && make z # all")) == [["banyan", "x"], ["make", "z"]]
