"""`banyan bench throughput`: a whole data set through this program's own engine at once."""

import time
from collections.abc import Callable, Sequence

from banyan.bench.prompts import Prompt

GenerateAll = Callable[[list[list[int]], list[dict[str, object]]], Sequence[dict[str, object]]]
"""(prompts as token ids, sampling parameters of each) -> native answers."""

_WARM_LEN = 16


def run_throughput(
    generate: GenerateAll, prompts: Sequence[Prompt], ignore_eos: bool, warm_up: bool
) -> dict[str, object]:
    """The figures under the keys of bench_offline_throughput."""
    ids = [prompt.ids for prompt in prompts]
    known = [i for i in ids if i is not None]
    assert len(known) == len(prompts), "prompts without token ids"
    sampling: list[dict[str, object]] = [
        {"temperature": 0, "max_new_tokens": p.output_len, "ignore_eos": ignore_eos}
        for p in prompts
    ]
    if warm_up:
        generate([known[0][:_WARM_LEN]], [{"temperature": 0, "max_new_tokens": 2}])
    began = time.perf_counter()
    answers = generate(known, sampling)
    seconds = time.perf_counter() - began
    meta = [answer["meta_info"] for answer in answers]
    inputs = sum(m["prompt_tokens"] for m in meta if isinstance(m, dict))
    outputs = sum(m["completion_tokens"] for m in meta if isinstance(m, dict))
    return {
        "backend": "engine",
        "successful_requests": len(answers),
        "total_latency": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(answers) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
    }
