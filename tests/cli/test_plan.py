"""`banyan plan`: what it says before a model is loaded is what the engine finds when it is."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from banyan.base.clock import WallClock
from banyan.base.errors import ConfigError, ModelError
from banyan.cli.main import VERBS, main
from banyan.cli.plan import LIBRARY_BYTES, AvailableMemory, cache_bytes_of, fit
from banyan.config.cli import parse
from banyan.config.devices import DeviceFacts
from banyan.config.env import Environment
from banyan.config.prepare import prepare
from banyan.engine.model_loader import Phases, agree_on_memory, open_model, plan_the_memory
from banyan.formats.shards import size_of_weights
from banyan.sim.layout import ParallelLayout, Weights, cache_groups
from tests.models.families import tiny
from tests.models.quantised_checkpoints import quantised
from tests.support.lora import write_adapter
from tests.system.checkpoint import write_tiny_model

GIB = 1 << 30
FAMILIES = ["qwen2", "gemma2", "qwen2, tied, some windows", "deepseek v2", "qwen3 moe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plan") / "model")


def opened(*words: str):
    config, model_config = prepare(parse(["--threads", "1", *words], Environment()), Environment())
    model = open_model(config, model_config, 0, "", Phases(WallClock()))
    return model, model_config


FLAGS = [
    (),
    ("--kv-cache-dtype", "int8"),
    ("--kv-cache-dtype", "fp32"),
    ("--kv-cache-dtype", "bf16"),
    ("--cpu-activations", "fp32"),
    ("--page-size", "32"),
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_pages_take_as_many_bytes_as_planned(folder: Path, flags: tuple[str, ...]) -> None:
    model, model_config = opened(str(folder), *flags)
    planned = cache_groups(
        model.config,
        model_config,
        ParallelLayout(),
        cache_bytes_of(model.config, model_config, True),
    )
    assert planned == agree_on_memory(model)[1]


@pytest.mark.parametrize("variant", FAMILIES)
def test_pages_of_every_kind_of_layer_are_planned(variant: str, tmp_path: Path) -> None:
    tiny(variant, tmp_path)
    for flags in ((), ("--kv-cache-dtype", "int8")):
        model, model_config = opened(str(tmp_path), "--skip-tokenizer-init", *flags)
        per_number = cache_bytes_of(model.config, model_config, True)
        planned = cache_groups(model.config, model_config, ParallelLayout(), per_number)
        assert planned == agree_on_memory(model)[1]


def test_the_cache_is_divided_as_the_engine_divides_it(folder: Path) -> None:
    model, model_config = opened(
        str(folder), "--max-total-tokens", "4096", "--max-running-requests", "9"
    )
    found = fit(model.config, model_config, AvailableMemory(8 * GIB, 4 * GIB, True), 4.0)
    engine = plan_the_memory(model)
    for name in ("groups", "cache_bytes", "max_total_tokens", "max_request_tokens", "max_running"):
        assert getattr(found.memory, name) == getattr(engine, name), name
    assert [found.at_once(n) for n in (1, 16, 17, 1024, 2048, 2049)] == [9, 9, 9, 4, 2, 0]


def test_a_share_of_the_memory_is_left_as_the_flags_say(folder: Path) -> None:
    model, model_config = opened(str(folder), "--mem-fraction-static", "0.5")
    many = replace(model.config.schedule, running_cap=1 << 20)  # the cache is the bound
    config = replace(model.config, schedule=many)
    weights = 4.0 * Weights.of(model_config).total
    found = fit(config, model_config, AvailableMemory(8 * GIB, 8 * GIB, True), 4.0)
    assert found.memory.cache_bytes == pytest.approx(4 * GIB - LIBRARY_BYTES - weights, rel=0.01)


def test_the_weights_are_those_of_the_files(folder: Path) -> None:
    _, model_config = opened(str(folder))
    assert 4.0 * Weights.of(model_config).total == pytest.approx(
        size_of_weights(model_config.path), rel=0.05
    )


def test_weights_of_a_quantised_folder_are_those_that_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 stays in 8 bits with a scale per 32 where the CPU's kernels multiply with it: they
    compute in fp32. Else it becomes BF16; --quantization rounds it again."""
    quantised("fp8 by output", tmp_path, vocab_size=99, intermediate_size=8192)
    words = (str(tmp_path), "--memory-gib", "1", "--skip-tokenizer-init")

    def weights(*more: str) -> float:
        found = re.search(r"^weights +([0-9.]+) MiB$", planned(capsys, *words, *more)[1], re.M)
        assert found is not None
        return float(found[1])

    count = 2 * (128 * 128 * 3 + 3 * 128 * 8192) / 2**20
    rest = 2 * 99 * 128 * 4 / 2**20
    assert weights() == pytest.approx(count * 36 / 32 + rest, abs=0.1)
    assert weights("--dtype", "bfloat16") == pytest.approx(count * 2 + rest, abs=0.1)
    facts = DeviceFacts(keeps_fp8=True)
    monkeypatch.setattr("banyan.cli.plan.facts_of", lambda config: facts)
    assert weights("--dtype", "bfloat16") == pytest.approx(count * 36 / 32 + rest, abs=0.1)
    monkeypatch.undo()
    assert weights("--quantization", "q4_0") == pytest.approx(count * 18 / 32 + rest, abs=0.1)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["plan", *words])
    return code, capsys.readouterr().out


def test_a_plan_says_what_fits_and_how_much(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(folder), "--memory-gib", "1", "--context", "1000")
    code, text = planned(capsys, *words, "--requests", "8")
    assert code == 0 and "8 × 1,000 tokens fit" in text
    assert re.search(r"^memory +1\.00 GiB free of 1\.00 GiB$", text, re.M)
    assert re.search(r"^weights +0\.\d MiB$", text, re.M)
    assert re.search(r"^ +2,048 +\d+ +0\.\d MiB$", text, re.M)
    code, text = planned(capsys, *words, "--requests", "4", "--max-total-tokens", "2048")
    assert code == 1 and "4 × 1,000 tokens do not fit: 2 would" in text
    code, text = planned(capsys, str(folder), "--context", "9999")
    assert code == 1 and "one request has 2,048 at most" in text


def test_a_folder_with_a_configuration_alone_is_planned(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    words = (str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init")
    code, text = planned(capsys, *words)
    assert code == 0 and "LlamaForCausalLM, 2 layers" in text


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--memory-gib", "0.2"]) != 0
    assert "the KV cache needs at least 2 pages" in capsys.readouterr().err


def test_the_memory_of_adapters_is_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "a", 1)
    words = ("--lora-paths", f"a={adapter}", "--lora-memory-gib", "0.25")
    code, text = planned(capsys, str(folder), *words)
    assert code == 0 and re.search(r"^adapters +at most 256\.0 MiB; 1 at the start, ", text, re.M)


def test_what_is_not_here_is_not_fetched() -> None:
    with pytest.raises(ModelError, match="a plan fetches nothing") as found:
        VERBS.load("plan")(["nobody/nothing-at-all"])
    assert "banyan pull nobody/nothing-at-all" in str(found.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--requests", "2"), "Give --context too"),
        (("--context", "-1"), "a number that is not below 0"),
        (("--memory-gib", "nan"), "below 0, and is nan"),
        (("--memory-gib", "1e300"), "must be at most"),
        (("--weight-bits", "inf"), "must be at most"),
        (("--quantization", "int8"), "--weight-bits"),
    ],
)
def test_a_question_that_is_none_is_refused(folder: Path, words, message) -> None:
    with pytest.raises(ConfigError, match=message):
        VERBS.load("plan")([str(folder), *words])
