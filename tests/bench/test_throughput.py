"""Offline throughput: keys and sums over a scripted engine."""

from banyan.bench.prompts import Prompt
from banyan.bench.throughput import run_throughput

KEYS = {
    "backend", "successful_requests", "total_latency", "total_input_tokens",
    "total_output_tokens", "request_throughput", "input_throughput", "output_throughput",
    "total_throughput",
}  # fmt: skip


def test_every_key_is_there_and_tokens_are_those_that_the_engine_counted() -> None:
    calls: list[list[list[int]]] = []

    def generate(
        ids: list[list[int]], sampling: list[dict[str, object]]
    ) -> list[dict[str, object]]:
        calls.append(ids)
        return [
            {"meta_info": {"prompt_tokens": len(i), "completion_tokens": s["max_new_tokens"]}}
            for i, s in zip(ids, sampling, strict=True)
        ]

    prompts = [Prompt("", [1] * n, n, n + 1) for n in (20, 30)]
    keys = run_throughput(generate, prompts, ignore_eos=True, warm_up=True)
    assert keys.keys() == KEYS
    assert (keys["total_input_tokens"], keys["total_output_tokens"]) == (50, 52)
    assert keys["successful_requests"] == 2
    assert [len(ids) for ids in calls] == [1, 2]
    assert len(calls[0][0]) == 16
