"""What drafts bring and cost: the same requests with and without them, in turn.

Two engines of one model are alive and one of them is asked at a time, so that what else the machine
does falls on both alike. Every request is new to both, unless `--again` asks it twice. With
`--draft` a model drafts; with `--problems` functions of HumanEval are completed too.

    python -m benchmarks.speculation [--model demo] [--rounds 3] [--new 200] [--again]
    python -m benchmarks.speculation --model BIG --draft SMALL [--steps 3] --problems FILE.jsonl
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from banyan.llm import Engine

FUNCTION = '''def total_{i}(orders, tax):
    """Add up the orders of customer {i}."""
    result = {i}
    for order in orders:
        if order.is_paid:
            result += order.price * order.count
        else:
            result -= order.discount
    return round(result * (1 + tax), 2)
'''
TASKS = {
    "editing": "Repeat this code exactly, with the comment '# checked' above it.\n\n" + FUNCTION,
    "quoting": "Read this text, then write all of it again, word by word:\n\n"
    "In the year {i} the harbour had {i} ships. Each of them carried salt, cloth and oil to the "
    "islands, and came back with fish and wine. The old keeper of the light counted them every "
    "evening, and wrote their names into a book that nobody was allowed to open.",
    "chat": "Tell me in a few sentences why the number {i} might be interesting, and what a child "
    "could learn from it.",
    "nonsense": "Write anything about {i}.",
}
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def timed(
    engine: Engine, prompts: list[str], new: int, hot: bool = False
) -> tuple[float, list[dict]]:
    """Seconds of requests that are asked at once, and the answers; `hot`: drawn so freely that
    nothing is foreseen."""
    heat = {"temperature": 1.5, "sampling_seed": 1} if hot else {"temperature": 0}
    began = time.perf_counter()
    answers = engine.generate(prompts, {"max_new_tokens": new, "ignore_eos": hot, **heat})
    assert isinstance(answers, list)
    return time.perf_counter() - began, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--again", action="store_true", help="ask every request twice")
    parser.add_argument("--draft", default="", help="the model that drafts, in place of NGRAM")
    parser.add_argument("--steps", type=int, default=0, help="drafts after each token, at most")
    parser.add_argument("--problems", type=Path, help="HumanEval's file, or a part of it")
    parser.add_argument("--questions", type=Path, help="MT-Bench's file: chat of all kinds")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--flags", type=json.loads, default={}, help="of the engine that drafts")
    parser.add_argument("--against", type=json.loads, help="let the other one draft, with these")
    options = parser.parse_args()
    flags: dict[str, Any] = {
        "model_path": options.model,
        "log_level": "error",
        "max_total_tokens": 8192,
    }
    drafts: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
    if options.draft:
        drafts = {"speculative_algorithm": "STANDALONE"}
        drafts["speculative_draft_model_path"] = options.draft
    if options.steps:
        drafts["speculative_num_steps"] = options.steps
    others = {} if options.against is None else drafts | options.against
    drafts |= options.flags
    with Engine(**flags, **others) as plain, Engine(**flags, **drafts) as drafting:
        for engine in (plain, drafting):
            timed(engine, [CHAT.format("Count to twenty.")] * options.batch, 60)
        print("| task | plain, tokens/s | with drafts | ratio | tokens per row | drafts right |")
        print("|---|---|---|---|---|---|")
        count = options.rounds * options.batch
        for name in options.tasks:
            prompts = [CHAT.format(TASKS[name].format(i=3 + 7 * i)) for i in range(count)]
            _measure(name, prompts, plain, drafting, options)
        if options.questions is not None:
            lines = options.questions.read_text().splitlines()
            lines = lines[:: max(1, len(lines) // count)][:count]
            prompts = [CHAT.format(json.loads(line)["turns"][0]) for line in lines]
            _measure("answering MT-Bench", prompts, plain, drafting, options)
        if options.problems is not None:
            lines = options.problems.read_text().splitlines()[:count]
            prompts = [json.loads(line)["prompt"] for line in lines]
            _measure("completing functions", prompts, plain, drafting, options)


def _measure(
    name: str, prompts: list[str], plain: Engine, drafting: Engine, options: argparse.Namespace
) -> None:
    tokens, seconds, rows, correct, proposed = 0, [0.0, 0.0], 0, 0, 0
    groups = [prompts[i : i + options.batch] for i in range(0, len(prompts), options.batch)]
    for i in range(len(groups) * (2 if options.again else 1)):
        group = groups[i // 2 if options.again else i]
        pair = [plain, drafting] if i % 2 else [drafting, plain]
        hot = name == "nonsense"
        answers = {id(engine): timed(engine, group, options.new, hot) for engine in pair}
        (slow, ones), (quick, others) = answers[id(plain)], answers[id(drafting)]
        seconds = [seconds[0] + slow, seconds[1] + quick]
        for one, other in zip(ones, others, strict=True):
            assert one["output_ids"] == other["output_ids"], "drafts have changed an answer"
            meta = other["meta_info"]
            tokens += meta["completion_tokens"]
            rows, correct = rows + meta["spec_verify_ct"], correct + meta["spec_num_correct_drafts"]
            proposed += meta["spec_num_proposed_drafts"]
    print(
        f"| {name} | {tokens / seconds[0]:.0f} | {tokens / seconds[1]:.0f} | "
        f"{seconds[0] / seconds[1]:.2f} | {1 + correct / max(1, rows):.2f} | "
        f"{correct} of {proposed} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
