"""Options: names that people's command lines use, and what they may not ask for."""

import math

import pytest

from banyan.base.errors import ConfigError
from banyan.bench.options import (
    BatchOptions,
    ServingOptions,
    ThroughputOptions,
    read_options,
    split_options,
)

SERVING_FLAGS = """backend base-url host port ready-check-timeout-sec dataset-name dataset-path
dataset-offset model served-model-name tokenizer num-prompts sharegpt-output-len
sharegpt-context-len random-input-len random-output-len random-range-ratio request-rate
use-trace-timestamps max-concurrency output-file output-details goodput print-requests disable-tqdm
disable-stream return-logprob top-logprobs-num logprob-start-len cache-report seed
disable-ignore-eos temperature top-p extra-request-body flush-cache warmup-requests tokenize-prompt
gsp-num-groups gsp-prompts-per-group gsp-system-prompt-len gsp-question-len gsp-output-len
gsp-range-ratio gsp-ordered mooncake-slowdown-factor mooncake-num-rounds mooncake-workload tag
header prompt-suffix""".split()  # noqa: SIM905


def serving(line: str) -> ServingOptions:
    return read_options(ServingOptions, line.split(), "bench", "")


def test_the_flags_of_bench_serving_are_there() -> None:
    known = set(ServingOptions.__dataclass_fields__)
    assert [f for f in SERVING_FLAGS if f.replace("-", "_") not in known] == []


def test_defaults_are_those_that_people_expect() -> None:
    found = serving("")
    assert (found.num_prompts, found.random_input_len, found.random_output_len) == (
        1000,
        1024,
        1024,
    )
    assert (found.seed, found.warmup_requests, found.random_range_ratio) == (42, 1, 0.0)
    assert math.isinf(found.request_rate)
    assert (found.gsp_num_groups, found.gsp_prompts_per_group) == (64, 16)


def test_flags_may_be_shortened() -> None:
    found = serving("--random-input 7 --random-output 8 --max-conc 3")
    assert (found.random_input_len, found.random_output_len, found.max_concurrency) == (7, 8, 3)


def test_a_flag_may_take_several_values() -> None:
    found = serving("--goodput ttft:5 tpot:6 --header A=B --seed 1")
    assert (found.goodput, found.header) == (("ttft:5", "tpot:6"), ("A=B",))


@pytest.mark.parametrize("flag", ["--profile", "--lora-name", "--apply-chat-template"])
def test_what_is_not_offered_is_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.split("=")[0]):
        serving(flag)


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="--no-such-flag"):
        serving("--no-such-flag 3")


def test_the_servers_flags_are_left_to_the_server() -> None:
    words = ["--model-path", "demo", "--batch-size", "1", "4", "--page-size", "32"]
    found, rest = split_options(BatchOptions, words, "bench", "")
    assert found.batch_size == (1, 4)
    assert rest == ["--model-path", "demo", "--page-size", "32"]


def test_throughput_runs_the_engine_and_nothing_else() -> None:
    assert split_options(ThroughputOptions, [], "bench", "")[0].backend == "engine"
    with pytest.raises(SystemExit):
        split_options(ThroughputOptions, ["--backend", "vllm"], "bench", "")
