"""Writes the tables of docs/ that come from the code: `python -m tests.pages`. `test_pages.py`
checks that the pages are up to date.

Every row needs a test; a row without one is an error.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from banyan.families import FAMILIES, GGUF
from banyan.families.nested import NESTED
from banyan.model_config.quantization import SPELLINGS
from banyan.models.weights.quant import FORMS, overview
from tests.models import (
    quantised,
    test_gguf_experts,
    test_gguf_families,
    test_gguf_hybrids,
    test_gguf_states,
    test_nested,
)
from tests.models.families import EXPERTS, OTHERS, STATES, VARIANTS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_FAMILIES = ROOT / "banyan" / "families" / "families.tsv"
_ELSEWHERE = {
    "LlamaForCausalLM": "test_llama.py",
    "MiMoForCausalLM": "test_mimo.py",
    "BailingMoeForCausalLM": "test_bailing.py",
    "BailingMoeV2ForCausalLM": "test_bailing.py",
    "Step3TextForCausalLM": "test_step.py",
    "WhisperForCausalLM": "../system/test_sound.py",
    "gguf/llama": "test_gguf.py",
    "gguf/gpt-oss": "test_gpt_oss.py",
    "gguf/step35": "test_step.py",
    "gguf/bailingmoe": "test_bailing.py",
    "gguf/bailingmoe2": "test_bailing.py",
}
"""Families with a file of tests of their own, in tests/models."""
_FORMS_ELSEWHERE = {"mxfp4": "tests/models/test_gpt_oss.py"}
"""Forms with tests outside of tests/models/test_quant.py."""
_FAMILY_HEAD = "| family | class in config.json | GGUF architecture | remarks |"
_NESTED_ELSEWHERE = {
    "Step3VLForConditionalGeneration": "test_step.py",
    "Step3p7ForConditionalGeneration": "test_families.py[step 3.7]",
    "InternVLChatModel": "test_nested.py",
    "WhisperForConditionalGeneration": "../system/test_sound.py",
    "KimiVLForConditionalGeneration": "test_nested.py[kimi k2.5]",
    "KimiK25ForConditionalGeneration": "test_nested.py[kimi k2.5]",
    "Qwen3_5ForConditionalGeneration": "test_families.py",
    "Qwen3_5MoeForConditionalGeneration": "test_families.py",
}
_NESTED_HEAD = "| multimodal class | text model | takes | weights of its towers |"


def family_rows() -> list[tuple[str, list[str], list[str], str]]:
    """Family, classes, architectures and note, as the table in banyan/families has them."""
    lines = _FAMILIES.read_text(encoding="utf-8").splitlines()[1:]
    cells = [line.split("\t") for line in lines]
    return [(family, c.split(), g.split(), note) for family, c, g, note in cells]


def _class_of(model: str) -> str:
    """Class of a transformers configuration name; image models name their text part separately."""
    name = "GPT2LMHeadModel" if model == "GPT2" else f"{model}ForCausalLM"
    return name if name in FAMILIES else f"{model.removesuffix('Text')}ForCausalLM"


def tests_of(name: str) -> list[str]:
    """Tests of a class, or of an architecture as "gguf/…"."""
    found = [_ELSEWHERE[name]] if name in _ELSEWHERE else []
    if name.startswith(GGUF):
        kits = (test_gguf_families, test_gguf_experts, test_gguf_states, test_gguf_hybrids)
        architecture = name.removeprefix(GGUF)
        cases = [(k, c) for k in kits for c, (a, _) in k.CASES.items() if a == architecture]
        found += [f"{kit.__name__.rpartition('.')[2]}.py[{case}]" for kit, case in cases]
    else:
        family = FAMILIES.load(name)
        models = (VARIANTS | EXPERTS | STATES).items()
        same = [v for v, (model, _) in models if FAMILIES.load(_class_of(model)) is family]
        found += [f"test_families.py[{variant}]" for variant in same]
        others = [v for v, (model, _) in OTHERS.items() if _class_of(model) == name]
        found += [f"test_other_families.py[{variant}]" for variant in others]
    if not found:
        raise LookupError(f"nothing in tests/models tries {name}")
    return found


def families() -> str:
    lines = [_FAMILY_HEAD, "|---|---|---|---|"]
    for family, classes, architectures, note in family_rows():
        named = [*classes, *(GGUF + name for name in architectures)]
        for name in named:
            tests_of(name)
        cells = [_marked(classes), _marked(architectures) or "–", note]
        lines.append(f"| {family} | {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def nested() -> str:
    """Multimodal checkpoints, their text models, and whether their towers are supported."""
    lines = [_NESTED_HEAD, "|---|---|---|---|"]
    for name, form in NESTED.items():
        model = name.removesuffix("ForConditionalGeneration")
        cases = [case for case, (its, *_) in test_nested.VARIANTS.items() if its == model]
        if not cases and name not in _NESTED_ELSEWHERE:
            raise LookupError(f"nothing in tests/models/test_nested.py tries {name}")
        text = f"`{form.text}`" if form.text else "named by its configuration"
        towers = _marked([prefix.rstrip(".") for prefix in form.towers])
        kinds = {"pictures": form.tower, "sound": form.sound}
        taken = ", ".join(kind for kind, names in kinds.items() if names) or "–"
        lines.append(f"| `{name}` | {text} | {taken} | {towers} |")
    return "\n".join(lines)


def _marked(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def forms() -> str:
    for form in FORMS:
        cases = [case for case in quantised.FORMS if case.split(",")[0].split(" ")[0] == form]
        if not cases and form not in _FORMS_ELSEWHERE:
            raise LookupError(f"nothing in tests/models/quantised.py tries {form}")
    return overview(SPELLINGS)


def pages() -> Iterator[tuple[Path, str]]:
    """Each page with its table."""
    yield DOCS / "models.md", families()
    yield DOCS / "models.md", nested()
    yield DOCS / "quantization.md", forms()


def write(page: Path, table: str) -> None:
    """Replace the table whose first column has the same name."""
    text = page.read_text(encoding="utf-8")
    start = text.index(table[: table.index("|", 2) + 1])
    end = text.index("\n\n", start)
    page.write_text(text[:start] + table + text[end:], encoding="utf-8")


def causal_classes() -> str:
    """Each causal class of the installed transformers: native with its test, or not."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    native = [name for name in names if name in FAMILIES or name in NESTED]
    lines = [
        f"{name}\t{tests_of(name)[0] if name in FAMILIES else 'test_nested.py'}" for name in native
    ]
    lines += [f"{name}\t--model-impl transformers" for name in names if name not in native]
    return "\n".join([*lines, f"{len(native)} of {len(names)} classes are served natively"])


if __name__ == "__main__":
    if sys.argv[1:] == ["classes"]:
        print(causal_classes())
    else:
        for page, table in pages():
            write(page, table)
