"""Names: files are found in one guess, pages name files that exist, and house words stay out."""

import ast
import re

import pytest

from tests.support.guess import misses
from tests.support.vocabulary import PAGES, ROOT, files, house_words

CLEAN = (
    "banyan/ascend",
    "banyan/base",
    "banyan/chat_template",
    "banyan/cli",
    "banyan/config",
    "banyan/context_parallel",
    "banyan/disaggregation",
    "banyan/dp_attention",
    "banyan/engine",
    "banyan/engine_client",
    "banyan/families",
    "banyan/formats",
    "banyan/grammar",
    "banyan/hub",
    "banyan/kv_cache",
    "banyan/kv_transfer",
    "banyan/layers",
    "banyan/lora",
    "banyan/messages",
    "banyan/model_config",
    "banyan/moe",
    "banyan/ops",
    "banyan/parallel",
    "banyan/parsers",
    "banyan/pipeline",
    "banyan/platform",
    "banyan/requests",
    "banyan/router",
    "banyan/runner",
    "banyan/scheduler",
    "banyan/server",
    "banyan/sim",
    "banyan/tokenizer",
    "benchmarks",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "docs",
)
"""Packages and pages without house words. A package that has lost its last one is added here."""


def test_a_reader_of_other_engines_finds_each_file_by_name() -> None:
    assert not misses()


KERNELS = {"Experts", "GroupedExperts", "LatentAttention", "PlainLinear", "RoundedLinear"}
"""Kernels of one op on several devices, and the layer that calls it, share a name."""
PROTOCOLS = {"EngineHandle", "LaunchedStep"}
"""What a caller needs, declared next to the caller, and the class that has it."""


def test_a_public_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for file in files(["banyan"]):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice.keys() - KERNELS - PROTOCOLS, twice


def test_files_that_pages_name_exist() -> None:
    paths = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|tsv))`")
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in files(PAGES)
        for path in paths.findall(page.read_text(encoding="utf-8"))
        if "foo." not in path and not any((ROOT / top / path).exists() for top in ("", "banyan"))
    ]
    assert not missing, "\n" + "\n".join(missing)


@pytest.mark.parametrize("path", CLEAN)
def test_house_words_stay_out(path: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {word}"
        for file in files([path])
        for line, word in house_words(file)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the engine is told the rest", ["told"]),
        ("a kernel beside the model, those of a rank", ["beside", "those of"]),
        ("servers behind a proxy, a server behind the router", []),
        ("it stands for a page", []),
    ],
)
def test_house_words_are_found_and_the_fields_own_uses_are_not(text: str, found: list[str]) -> None:
    from tests.support.vocabulary import in_prose

    assert [word for _, word in in_prose(text, 1)] == found
