"""Rows that are sent to the ranks of their experts: what goes together, decided at start."""

import re
from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.defaults import Defaults, settle
from banyan.config.env import read_environment
from banyan.config.resolve import resolve
from banyan.config.rules.ignored import ignored_flags
from banyan.config.schema import Config
from banyan.moe.rules import LIMIT, check_exchange_size, sends_rows, slot_bytes
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.experts import EXPERTS

DEEPEP = ("--moe-a2a-backend", "deepep")
FUSED = ("--device", "npu", "--moe-a2a-backend", "ascend_fuseep")
MODE = "SGLANG_NPU_FUSED_MOE_MODE"
JOINED = ("--tp", "4", "--dp", "2", "--enable-dp-attention")
WIDE = replace(EXPERTS, num_heads=8, num_kv_heads=4)


def config_with(*flags: str, limit: str = "") -> Config:
    given = read_environment({LIMIT: limit} if limit else {})
    return resolve(parse(flags, given), WIDE, NOTHING)


def test_experts_are_shared_out_among_all_ranks() -> None:
    config = config_with("--tp", "4", *DEEPEP)
    assert config.parallel.ep == 4 and sends_rows(config)
    assert not sends_rows(config_with("--tp", "4", "--ep", "4"))


@pytest.mark.parametrize(
    ("flags", "limit", "match"),
    [
        (
            (*DEEPEP, "--tp", "4", "--ep", "2"),
            "",
            "experts are divided among all ranks or not at all",
        ),
        ((*DEEPEP, "--model-impl", "transformers"), "", "cannot be combined with --model-impl t"),
        ((*DEEPEP, "--tp", "4"), "0", f"{LIMIT}=0 .* cannot be combined with --deepep-mode auto"),
        ((*DEEPEP, "--tp", "4"), "1025", f"{LIMIT} must be in"),
        (
            (*FUSED, "--tp", "4", "--deepep-mode", "normal"),
            "",
            "ascend_fuseep cannot be combined with --deepep-mode n",
        ),
        ((*FUSED, "--tp", "4"), "0", f"{LIMIT}=0 .* cannot be combined"),
        (("--moe-a2a-backend", "mori"), "", "mori is not available .*ranks exchange rows through"),
        (
            ("--deepep-config", "{}"),
            "",
            "--deepep-config is not available .*GPU communication library",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(flags, limit, match) -> None:
    with pytest.raises(ConfigError, match=match):
        config_with(*flags, limit=limit)


def test_a_model_without_experts_has_none_to_send_rows_to() -> None:
    with pytest.raises(ConfigError, match="deepep: this model has no experts"):
        resolve(parse(DEEPEP, NOTHING), MODEL_CONFIG, NOTHING)


def test_the_switch_makes_experts_whole_on_every_rank() -> None:
    assert config_with("--tp", "4", "--enable-ep-moe").parallel.ep == 4
    assert config_with("--tp", "4").parallel.ep == 1
    dense = resolve(parse(("--tp", "2", "--enable-ep-moe"), NOTHING), MODEL_CONFIG, NOTHING)
    assert dense.parallel.ep == 1


def test_a_step_of_low_latency_is_within_the_bound() -> None:
    flags = (*JOINED, *DEEPEP, "--chunked-prefill-size", "248")
    low = config_with(*flags, "--deepep-mode", "low_latency")
    check_exchange_size(low, 8)
    with pytest.raises(ConfigError, match="which is 129 for each of 2 ranks; .* is 128"):
        check_exchange_size(low, 9)
    for mode in ("auto", "normal"):
        check_exchange_size(config_with(*flags, "--deepep-mode", mode), 2048)
    check_exchange_size(config_with("--tp", "4", "--ep", "4"), 2048)


@pytest.mark.parametrize(
    ("flags", "limit", "chunk", "running"),
    [
        ((), "", 256 - 128, 128),
        ((), "24", 24, 24),
        (("--max-running-requests", "40"), "24", 8, 24),
        (("--chunked-prefill-size", "30"), "24", 30, 24),
        (("--deepep-mode", "auto"), "24", 2048, 256),
    ],
)
def test_what_nobody_says_is_within_the_bound(flags, limit, chunk: int, running: int) -> None:
    low = config_with(*JOINED, *DEEPEP, "--deepep-mode", "low_latency", *flags, limit=limit)
    found, _ = settle(low, Defaults("some", ("float16",), 16, 2048, 256, 0.8))
    assert (found.schedule.chunk_tokens, found.schedule.running_cap) == (chunk, running)
    if "--chunked-prefill-size" not in flags:
        check_exchange_size(found, found.schedule.max_running or running)


def test_a_variable_is_the_bound() -> None:
    flags = (*JOINED, *DEEPEP, "--deepep-mode", "low_latency", "--chunked-prefill-size", "40")
    low = config_with(*flags, limit="24")
    check_exchange_size(low, 8)
    with pytest.raises(ConfigError, match="is 25 for each of 2 ranks; .* is 24"):
        check_exchange_size(low, 9)


def test_the_operator_that_runs_experts_is_one_of_two() -> None:
    fused = parse(("--tp", "4", *FUSED), read_environment({MODE: "2"}))
    assert resolve(fused, WIDE, NOTHING).experts.fuse_mode == 2
    assert config_with("--tp", "4", *FUSED).experts.fuse_mode == 1
    for value in ("0", "3"):
        with pytest.raises(ConfigError, match=f"{MODE} must be in"):
            parse((), read_environment({MODE: value}))
    idle = parse((), read_environment({MODE: "2"}))
    assert any(MODE in line for line in ignored_flags(resolve(idle, WIDE, NOTHING), {}, NOTHING))


def test_what_travels_at_once_has_room() -> None:
    flags, row = (*JOINED, *DEEPEP), WIDE.hidden_size * 4
    assert slot_bytes(config_with(*flags, limit="24"), WIDE) == 4 * 24 * row
    pairs = config_with(*flags, "--ep-dispatch-algorithm", "static", limit="24")
    assert slot_bytes(pairs, WIDE) == 2 * 4 * 24 * row
    assert slot_bytes(config_with(*flags, "--deepep-mode", "normal", limit="0"), WIDE) == 0
    assert slot_bytes(config_with(*JOINED), WIDE) == 0


@pytest.mark.parametrize(
    ("flags", "limit", "match"),
    [
        (("--deepep-mode", "normal"), "", "--deepep-mode is accepted but .* go to all ranks"),
        (DEEPEP, "", "--moe-a2a-backend is accepted but has no effect: one rank has all experts"),
        ((), "24", f"{LIMIT} is set but has no effect"),
        ((*DEEPEP, "--tp", "4", "--deepep-mode", "normal"), "24", f"{LIMIT} is set but has no"),
    ],
)
def test_what_has_no_effect_is_reported(flags, limit, match) -> None:
    config = config_with(*flags, limit=limit)
    reported = list(ignored_flags(config, {"experts.a2a": "", "experts.a2a_mode": ""}, NOTHING))
    [line] = [line for line in reported if "a2a" in line or "deepep" in line.lower()]
    assert re.search(match, line), line
