"""What constraints cost: `python -m tests.grammar.cost`.

Batches of the demo model, once free and once with as many different schemas, in turns within one
run, so that whatever else the machine does hits both alike. No answer ends before its last token.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from banyan.llm import Engine

_PLACES = ("harbour", "museum", "library", "market", "station", "theatre", "garden", "castle")


@dataclass(frozen=True)
class Cost:
    """Per output token, in milliseconds."""

    cpu: float
    wall: float


def values(number: int) -> dict[str, object]:
    """Nothing in it can be foretold but white space."""
    text = {"type": "string", "minLength": 10, "maxLength": 60 + number}
    item = {"anyOf": [text, {"type": "integer", "minimum": number}, {"type": "boolean"}]}
    return {"type": "array", "items": item, "minItems": 1000}


def records(number: int) -> dict[str, object]:
    """Long names that are always the same."""
    place = _PLACES[number % len(_PLACES)]
    members = {
        f"{place}_identification_number": {"type": "integer", "minimum": 0, "maximum": 999},
        f"is_open_to_visitors_of_the_{place}": {"type": "boolean"},
    }
    item = {
        "type": "object",
        "properties": members,
        "required": list(members),
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 1000}


def measure(engine: Engine, schemas: Sequence[dict[str, object] | None], length: int) -> Cost:
    prompts = [f"Answer {i} as JSON:" for i in range(len(schemas))]
    sampling = [
        {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        | ({} if schema is None else {"json_schema": json.dumps(schema)})
        for schema in schemas
    ]
    cpu, wall = time.process_time(), time.perf_counter()
    answers = engine.generate(prompts, sampling)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert isinstance(answers, list)
    counts = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert counts == [length] * len(schemas), counts
    total = sum(counts)
    return Cost(1e3 * cpu / total, 1e3 * wall / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schemas", choices=("values", "records"), default="values")
    parser.add_argument("--grammar-backend", default="llguidance")
    parser.add_argument("--compact", action="store_true", help="no white space in JSON")
    chosen = parser.parse_args()
    make = values if chosen.schemas == "values" else records
    bound = [make(i) for i in range(chosen.batch_size)]
    free = [None] * chosen.batch_size
    flags: dict[str, object] = {"grammar_backend": chosen.grammar_backend}
    if chosen.compact:
        flags["constrained_json_disable_any_whitespace"] = True
    pairs: list[tuple[Cost, Cost]] = []
    with Engine("demo", engine_mode="inprocess", log_level="error", **flags) as engine:
        for schemas in (free, bound, free, bound):
            measure(engine, schemas, chosen.output_len)
        for i in range(chosen.rounds):
            order = (free, bound) if i % 2 == 0 else (bound, free)
            first, second = (measure(engine, schemas, chosen.output_len) for schemas in order)
            pairs.append((first, second) if i % 2 == 0 else (second, first))
    for name in ("cpu", "wall"):
        ratios = sorted(getattr(b, name) / getattr(a, name) for a, b in pairs)
        before, after = (
            statistics.median(getattr(x, name) for x in side) for side in zip(*pairs, strict=True)
        )
        print(
            f"{name}: {before:.3f} ms/token free, {after:.3f} constrained; ratio of pairs "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} … {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
