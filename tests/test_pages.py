"""Pages: tables agree with the code, and sentences are short."""

import ast
import re

import pytest

from banyan.families import known_classes, known_gguf
from banyan.families.nested import NESTED
from tests import pages
from tests.models import quantised
from tests.support import prose

VECTORS = ("Model", "ForSequenceClassification")
"""Ends of classes that are served for vectors; they have a section of their own."""


@pytest.mark.parametrize("page", ["models.md", "quantization.md"])
def test_tables_are_those_that_the_script_makes(page: str) -> None:
    text = (pages.DOCS / page).read_text(encoding="utf-8")
    tables = [table for path, table in pages.pages() if path.name == page]
    assert tables and all(f"{table}\n\n" in text for table in tables), "python -m tests.pages"


def test_every_class_and_architecture_has_a_row_and_a_test() -> None:
    rows = pages.family_rows()
    listed = [name for _, classes, _, _ in rows for name in classes]
    alone = [name for name in known_classes() if name not in NESTED]
    alone = [name for name in alone if name.endswith("LMHeadModel") or not name.endswith(VECTORS)]
    assert sorted(listed) == sorted(alone)
    listed = {name for _, _, architectures, _ in rows for name in architectures}
    assert listed == set(known_gguf())
    for name in [*alone, *(pages.GGUF + name for name in listed)]:
        assert pages.tests_of(name), name


def test_the_tests_that_rows_name_exist() -> None:
    named = {file for name in pages._ELSEWHERE for file in pages.tests_of(name)}
    files = {name.partition("[")[0] for name in named} | {"test_families.py", "test_quant.py"}
    for file in files:
        tree = ast.parse((pages.ROOT / "tests" / "models" / file).read_text(encoding="utf-8"))
        functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert any(name.startswith("test_") for name in functions), file
    for name, file in pages._ELSEWHERE.items():
        text = (pages.ROOT / "tests" / "models" / file).read_text(encoding="utf-8")
        word = name.removeprefix(pages.GGUF).removesuffix("ForCausalLM")
        assert word.lower().replace("moev2", "moe") in text.lower(), name


def test_a_form_that_nothing_tries_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {name: form for name, form in quantised.FORMS.items() if not name.startswith("quark")}
    monkeypatch.setattr(quantised, "FORMS", left)
    with pytest.raises(LookupError, match="quark"):
        pages.forms()


def test_a_table_is_written_in_the_place_of_the_old_one(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n| form | x |\n|---|---|\n| old | 1 |\n\nbehind\n")
    pages.write(page, "| form | y |\n|---|---|\n| new | 2 |")
    assert page.read_text() == "before\n\n| form | y |\n|---|---|\n| new | 2 |\n\nbehind\n"


@pytest.mark.parametrize(
    "page", [pages.ROOT / "README.md", *sorted(pages.DOCS.glob("*.md"))], ids=lambda p: p.name
)
def test_sentences_are_short(page: pages.Path) -> None:
    mean, long = prose.measure(page)
    assert not long
    assert mean <= prose.MEAN


LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(page: pages.Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {
        re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in HEADING.findall(text)
    }


@pytest.mark.parametrize(
    "page",
    [*pages.ROOT.glob("*.md"), *pages.DOCS.glob("*.md"), *pages.ROOT.glob("examples/*.md")],
    ids=lambda p: p.name,
)
def test_links_lead_to_files_and_headings_that_exist(page: pages.Path) -> None:
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


def test_the_length_of_sentences_is_counted_without_code_and_links() -> None:
    text = (
        "# A head\n\nOne two `x y z`\nfour. Five six seven [eight](nine.md)!\n\n"
        "    a block of code\n\n- Some more words.\n"
    )
    assert [prose.words(sentence) for sentence in prose.sentences(text)] == [4, 4, 3]
    assert list(prose.sentences("| one two three | b |\n", has_cells=False)) == []
