"""Schemas of the wild, drawn from by a model that knows nothing: what ends is valid, and what a
backend does not honour is refused by name.
"""

import gzip
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import jsonschema
import pytest

from banyan.base.errors import RequestError
from banyan.grammar.compiler import GrammarCompiler
from banyan.grammar.vocabulary import longest_first
from banyan.grammar.workshop import GrammarLimits
from banyan.messages.constraint import JSON_SCHEMA, Constraint
from tests.grammar.play import VOCABULARY, play

DATA = Path(__file__).resolve().parents[3] / "shared/data/schemas/maskbench_train70.jsonl.gz"
PACKAGES = {"llguidance": "llguidance", "xgrammar": "xgrammar", "outlines": "outlines_core"}
FEW = {"llguidance": 40, "xgrammar": 10, "outlines": 6}
"""`make test-schemas` takes 500."""
LIMITS = {"llguidance": 20.0, "xgrammar": 5.0, "outlines": 2.0}
"""Seconds for one schema; what takes longer counts as refused."""
LEAST = {"llguidance": 0.7, "xgrammar": 0.2, "outlines": 0.0}
"""Part of the schemas that must be compiled."""


def schemas(count: int) -> Iterator[tuple[str, dict[str, object]]]:
    """(file, schema), the same every time and spread over all families."""
    if not DATA.exists():
        pytest.skip("the schemas of MaskBench are not here")
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    Random(2026).shuffle(lines)
    for line in lines[:count]:
        entry = json.loads(line)
        yield entry["file"], entry["schema"]


def check(name: str, count: int) -> None:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    compiler = GrammarCompiler(
        (name,),
        lambda: (VOCABULARY, longest_first(VOCABULARY)),
        limits=GrammarLimits(time_s=LIMITS[name]),
    )
    ended, refused, taken = 0, [], 0
    try:
        for file, schema in schemas(count):
            grammar = Constraint(JSON_SCHEMA, json.dumps(schema)).encode()
            try:
                compiler(grammar)
            except RequestError as error:
                assert error.status == 400 and len(error.text) > 40, (file, error)
                refused.append(error.text)
                continue
            taken += 1
            for seed in range(2):
                played = play(compiler(grammar), Random(seed))
                assert not played.is_stuck, (file, played.text)
                if played.is_ended:
                    ended += 1
                    assert not _fault(played.text, schema), (file, played.text[:500])
    finally:
        compiler.close()
    print(f"{name}: {taken} of {count} schemas compiled, {ended} of {2 * taken} outputs ended")
    assert taken >= LEAST[name] * count and ended >= 0.5 * taken, "\n".join(refused)


def _fault(text: str, schema: dict[str, object]) -> str:
    value = json.loads(text)
    validator = jsonschema.validators.validator_for(schema)
    try:
        validator.check_schema(schema)
    except jsonschema.SchemaError:
        return ""  # written for another draft than it says: there is nothing to compare with
    return "; ".join(error.message[:200] for error in validator(schema).iter_errors(value))


@pytest.mark.parametrize("name", PACKAGES)
def test_whatever_ends_is_valid(name: str):
    check(name, int(os.environ.get("SCHEMA_CASES", FEW[name])))
