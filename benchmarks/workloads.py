"""The lines of the comparison: what is asked, and the figures that are read off."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from banyan.bench.options import ServingOptions

HIGH, LOW = "higher is better", "lower is better"


@dataclass(frozen=True)
class Figure:
    """One number of a run.

    Attributes:
        read: from the keys of `bench serving`.
        better: HIGH or LOW.
    """

    name: str
    unit: str
    read: Callable[[Mapping[str, object]], float]
    better: str = HIGH


@dataclass(frozen=True)
class Workload:
    """One line or more of the table.

    Attributes:
        title: `{out}` stands for the length of an answer, which a shortened run has less of.
        is_disturbed: a foreign process keeps one core busy meanwhile.
    """

    name: str
    title: str
    options: ServingOptions
    figures: tuple[Figure, ...]
    is_disturbed: bool = False

    @property
    def shown(self) -> str:
        given = self.options
        is_shared = given.dataset_name == "generated-shared-prefix"
        return self.title.format(out=given.gsp_output_len if is_shared else given.random_output_len)

    def seeded(self, seed: int, vocab_size: int) -> ServingOptions:
        """Prompts of one round: the same for every engine, new in every round."""
        return replace(self.options, seed=seed, vocab_size=vocab_size)


def _number(keys: Mapping[str, object], name: str) -> float:
    value = keys[name]
    assert isinstance(value, int | float), name
    return float(value)


def _key(name: str) -> Callable[[Mapping[str, object]], float]:
    return lambda keys: _number(keys, name)


def _fixed(count: int, concurrency: int, input_len: int, output_len: int) -> ServingOptions:
    return ServingOptions(
        dataset_name="random-ids",
        num_prompts=count,
        max_concurrency=concurrency,
        random_input_len=input_len,
        random_output_len=output_len,
        random_range_ratio=1.0,
        backend="openai",
        disable_keep_alive=True,
    )


_SHARED = ServingOptions(
    dataset_name="generated-shared-prefix",
    gsp_num_groups=1,
    gsp_prompts_per_group=32,
    gsp_system_prompt_len=1024,
    gsp_question_len=32,
    gsp_output_len=32,
    max_concurrency=32,
    backend="openai",
    disable_keep_alive=True,
)
_TTFT = (
    Figure("TTFT p50", "ms", _key("median_ttft_ms"), LOW),
    Figure("TTFT p99", "ms", _key("p99_ttft_ms"), LOW),
)
_OUTPUT = Figure("output", "tokens/s", _key("output_throughput"))


def _decode_rate(keys: Mapping[str, object]) -> float:
    return 1e3 / _number(keys, "median_tpot_ms")


def _prefill_rate(keys: Mapping[str, object]) -> float:
    each = _number(keys, "total_input_tokens") / _number(keys, "completed")
    return each / (_number(keys, "median_ttft_ms") / 1e3)


def _all() -> tuple[Workload, ...]:
    decode = Figure("decode", "tokens/s", _decode_rate)
    prefill = Figure("prefill", "tokens/s", _prefill_rate)
    total = Figure("total", "s", _key("duration"), LOW)
    eight = _fixed(24, 8, 128, 128)
    return (
        Workload("c1", "1 at a time, 128 in, {out} out", _fixed(4, 1, 128, 128), (decode, *_TTFT)),
        Workload("prefill", "1,024 in, 1 out", _fixed(4, 1, 1024, 1), (prefill,)),
        Workload("c8", "8 at once, 128 in, {out} out", eight, (_OUTPUT, *_TTFT)),
        Workload("c32", "32 at once, 128 in, {out} out", _fixed(64, 32, 128, 128), (_OUTPUT,)),
        Workload("prefix", "32 × (1,024 shared + 32 own), {out} out", _SHARED, (total,)),
        Workload(
            "busy", "8 at once, {out} out, one core taken", eight, (_OUTPUT,), is_disturbed=True
        ),
    )


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _all()}


def shortened(workload: Workload, share: float) -> Workload:
    """The same shape with fewer requests and shorter answers, to try the set-up."""
    given = workload.options

    def less(count: int) -> int:
        return max(1, round(count * share))

    if share == 1:
        return workload
    return replace(
        workload,
        options=replace(
            given,
            num_prompts=max(given.max_concurrency or 1, less(given.num_prompts)),
            random_output_len=max(2, less(given.random_output_len))
            if given.random_output_len > 1
            else 1,
            gsp_output_len=max(2, less(given.gsp_output_len)),
        ),
    )
