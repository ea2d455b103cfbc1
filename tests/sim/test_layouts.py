"""Layouts on paper and in virtual time: what fits, what a step takes, who gets which request."""

import json
from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.simulate import simulate
from banyan.config.defaults import Defaults, settle
from banyan.config.schema import Config
from banyan.messages.plan import Row, StepPlan
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import ExpertFacts, LatentFacts
from banyan.sim.device import PipelineDevice, Roofline, World
from banyan.sim.layout import (
    SHEETS,
    Hardware,
    ParallelLayout,
    Weights,
    read_hardware,
    read_layout,
    weights_per_device,
)
from banyan.sim.study import StudyQuestion, study
from banyan.sim.workload import Arrival, poisson
from tests.models.families import EXPERTS, tiny
from tests.support.simulated import MODEL_CONFIG

FAST = Hardware(
    memory_gib=2,
    bytes_per_s=50e9,
    flops_per_s=1e12,
    overhead_s=1e-4,
    link_bytes_per_s=20e9,
    link_s=2e-6,
)
SLOW_LINK = Hardware(
    memory_gib=2, bytes_per_s=50e9, flops_per_s=1e12, link_bytes_per_s=0.5e9, link_s=1e-4
)
DEFAULTS = Defaults("simulated", ("bfloat16",), 16, 512, 512, 0.85)
CONFIG = settle(Config(), DEFAULTS)[0]


def decoding(rows, start=100):
    return StepPlan(step=1, rows=[Row(slot=i + 1, start=start, count=1) for i in range(rows)])


def question(hardware=FAST, model_config=MODEL_CONFIG, rate=4.0, count=40, **more):
    arrivals = list(poisson(rate, count, 300, 20, seed=3))
    return StudyQuestion(
        config=CONFIG,
        model_config=model_config,
        hardware=hardware,
        arrivals=arrivals,
        weight_bits=16,
        **more,
    )


SEES = ("model.vision_model.", "model.multi_modal_projector.")


@pytest.mark.parametrize("variant", ["qwen3", "qwen2, tied, some windows", *EXPERTS])
def test_the_weights_on_paper_are_those_of_the_checkpoint(variant, tmp_path):
    model = tiny(variant, tmp_path)
    model_config = read_model_config(str(tmp_path))

    held = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not name.endswith("bias") and not name.startswith(SEES)
    ]
    assert Weights.of(model_config).total == sum(held)


def test_more_ranks_take_less_time_where_their_link_lets_them():
    def seconds(hardware, ranks, rows):
        return Roofline(MODEL_CONFIG, hardware, ParallelLayout(tp=ranks)).seconds(decoding(rows))

    assert seconds(FAST, 2, 1) < 0.7 * seconds(FAST, 1, 1)
    assert seconds(SLOW_LINK, 2, 1) > seconds(FAST, 2, 1) + 2 * MODEL_CONFIG.num_layers * 1e-4
    assert seconds(SLOW_LINK, 4, 64) > seconds(SLOW_LINK, 1, 64)


def test_a_sum_costs_what_a_ring_costs():
    assert FAST.all_reduce_s(1, 1e9) == 0
    assert FAST.all_reduce_s(4, 4e6) == pytest.approx(6 * (2e-6 + 1e6 / 20e9))


def test_a_step_reads_the_experts_that_its_tokens_chose():
    facts = ExpertFacts(count=64, per_token=2, inner=1024)
    model = Roofline(replace(MODEL_CONFIG, experts=facts), FAST)
    one, many = model.seconds(decoding(1)), model.seconds(decoding(256))
    routed = Weights.of(replace(MODEL_CONFIG, experts=facts)).routed * 2 / FAST.bytes_per_s
    assert one < 0.1 * routed
    assert many > routed


def test_ranks_beyond_the_key_heads_keep_copies_of_them():
    four, eight = (study(question(), ParallelLayout(tp=n)).memory for n in (4, 8))
    assert MODEL_CONFIG.num_kv_heads == 4
    assert four.cache_bytes == pytest.approx(eight.cache_bytes, rel=0.2)
    assert four.groups[0].num_pages == pytest.approx(eight.groups[0].num_pages, rel=0.2)


def test_joined_replicas_keep_tokens_apart_where_ranks_alone_would_keep_each_token_of_all():
    latent = replace(
        MODEL_CONFIG,
        latent=LatentFacts(query_rank=0, rank=512, plain_dim=64, rope_dim=64, value_dim=64),
    )
    ranks = study(question(model_config=latent), ParallelLayout(tp=4))
    joined = study(
        question(model_config=latent), ParallelLayout(tp=4, dp=4, uses_dp_attention=True)
    )
    assert joined.layout.devices == ranks.layout.devices == 4
    assert 4 * joined.memory.max_total_tokens > 2 * ranks.memory.max_total_tokens
    assert joined.report.finished == ranks.report.finished == 40


def test_a_model_that_does_not_fit_says_so_and_fits_on_more_devices():
    tight = replace_memory(0.55)
    assert weights_per_device(MODEL_CONFIG, ParallelLayout(), 2.0) > 0.5 * (1 << 30)
    alone, two = (
        study(question(tight), ParallelLayout()),
        study(question(tight), ParallelLayout(tp=2)),
    )
    assert alone.report is None and "MiB" in alone.why
    assert two.report.finished == 40


class Fixed:
    """A stage takes as many seconds as the step has rows; its logits take a tenth of one."""

    def stage_s(self, plan):
        return float(len(plan.rows))

    def head_s(self, plan):
        return 0.1


def test_stages_take_their_turns_together_and_the_longest_decides():
    world, ended = World(), {}
    line = PipelineDevice(world, Fixed(), 2)
    for number, rows in enumerate((1, 3, 1)):
        line.begin(decoding(rows), 0.0, lambda n=number: ended.update({n: world.clock.now()}))
    world.run()
    # Turns of 1; of max(3, 1) and the first step's logits; of max(1, 3) and …; of 1 and …
    assert ended == pytest.approx({0: 4.1, 1: 7.2, 2: 8.3})


def test_a_step_that_comes_late_is_waited_for_and_none_makes_the_others_wait():
    world, ended = World(), []
    line = PipelineDevice(world, Fixed(), 2)
    line.begin(decoding(1), 0.0, lambda: ended.append(world.clock.now()))
    line.begin(decoding(1), 5.0, lambda: ended.append(world.clock.now()))
    world.run()
    assert ended == pytest.approx([6.1, 7.2])


def test_stages_are_as_quick_as_their_steps_side_by_side():
    """Many requests: two stages give nearly twice what one device gives, where steps overlap."""
    heavy = question(rate=1000.0, count=60)
    apart = replace(heavy.config.schedule, depth=1)
    by_itself = replace(heavy, config=replace(heavy.config, schedule=apart))
    one, two = (study(heavy, ParallelLayout(pp=n)).report for n in (1, 2))
    slow = study(by_itself, ParallelLayout(pp=2)).report
    assert one.finished == two.finished == slow.finished == 60
    assert two.seconds < 0.6 * one.seconds
    assert slow.seconds > 0.9 * one.seconds, "one step in flight goes through all stages alone"


def test_joined_replicas_take_every_step_together():
    """One has a long prompt, and the other one's tokens come as late; alone they come sooner."""
    arrivals = [Arrival(0.0, bytes(4 * 9000), 40), Arrival(0.0, bytes(4 * 8), 40)]
    asked = replace(question(), arrivals=arrivals)
    joined = study(asked, ParallelLayout(tp=2, dp=2, uses_dp_attention=True)).report
    apart = study(asked, ParallelLayout(tp=1, dp=2)).report
    assert joined.finished == apart.finished == 2
    assert joined.itl.p99 > 2 * apart.itl.p50


def test_divided_prompts_save_what_sums_of_attention_cost_and_decode_no_sooner():
    def seconds(plan, hardware=FAST, **layout):
        return Roofline(MODEL_CONFIG, hardware, ParallelLayout(**layout)).seconds(plan)

    prompt = StepPlan(step=1, rows=[Row(slot=1, start=0, count=4096)])
    assert seconds(prompt, tp=4, cp=4) < 0.4 * seconds(prompt)
    assert seconds(prompt, SLOW_LINK, tp=4, cp=4) < seconds(prompt, SLOW_LINK, tp=4)
    assert seconds(decoding(1), tp=4, cp=4) > seconds(decoding(1), tp=4)
    assert weights_per_device(MODEL_CONFIG, ParallelLayout(tp=4, cp=4), 2.0) > weights_per_device(
        MODEL_CONFIG, ParallelLayout(tp=4), 2.0
    )


def replace_memory(gib):
    fields = {name: getattr(FAST, name) for name in FAST.__struct_fields__}
    return Hardware(**{**fields, "memory_gib": gib})


def test_two_replicas_finish_a_heavy_load_sooner():
    one, two = (
        study(question(rate=1000.0, count=200), ParallelLayout(dp=n)).report for n in (1, 2)
    )
    assert one.finished == two.finished == 200
    assert two.seconds < 0.7 * one.seconds


def test_a_fixed_concurrency_is_shared_by_the_replicas():
    found = study(question(concurrency=4), ParallelLayout(dp=2)).report
    assert found.finished == 40


def test_the_same_question_has_the_same_answer():
    layout = ParallelLayout(tp=2, dp=2, uses_dp_attention=True)
    assert study(question(), layout) == study(question(), layout)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tp=0", "tp=0"),
        ("tp=two", "tp=two"),
        ("xp=2", "xp=2"),
        ("tp=4,dp=3,dp-attention", "4 ranks"),
        ("tp=4,cp=3", "4 ranks cannot be divided by 3 shares"),
        ("tp=4,cp=2,pp=2", "one stage"),
        ("tp=4,cp=2,dp=2,dp-attention", "one stage"),
        ("tp=4,cp=2,prefill=1,decode=1", "servers that do all"),
    ],
)
def test_a_layout_that_is_none_is_refused(text, named):
    with pytest.raises(ConfigError, match=named):
        read_layout(text)


def test_a_layout_is_read_as_it_is_shown():
    for text in ("tp=1", "tp=8,pp=2,dp=3", "tp=8,dp=4,dp-attention", "tp=8,cp=4,dp=2"):
        assert str(read_layout(text)) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "no hardware"),
        ('{"memory_gib": 1, "bytes_per_s": 1}', "flops_per_s"),
        ('{"memory_gib": 1, "bytes_per_s": 1, "flops_per_s": 1, "colour": 1}', "colour"),
        ('{"memory_gib": 0, "bytes_per_s": 1, "flops_per_s": 1}', "memory_gib must be above 0"),
    ],
)
def test_hardware_that_is_none_is_refused(content, reason, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        read_hardware(str(file))


def test_unknown_hardware_is_answered_with_the_known():
    with pytest.raises(ConfigError) as found:
        read_hardware("abacus")
    assert all(name in found.value.hint for name in SHEETS)


def test_the_command_compares_layouts_of_a_model_without_weights(tmp_path, capsys):
    tiny("qwen3", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({n: getattr(FAST, n) for n in FAST.__struct_fields__}))
    words = [str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init"]
    words += ["--hardware", str(mine), "--requests", "20", "--input-len", "40"]

    assert simulate([*words, "--output-len", "8", "--layouts", "tp=1", "tp=2,dp=2"]) == 0

    title, first, second = capsys.readouterr().out.splitlines()
    assert "ttft p50" in title
    assert first.split()[:2] == ["tp=1", "1"] and second.split()[:2] == ["tp=2,dp=2", "4"]


def test_the_layout_is_that_of_the_flags_where_none_is_named(tmp_path, capsys):
    tiny("qwen3", tmp_path)
    words = [str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init", "--requests", "2"]
    words += ["--input-len", "8", "--output-len", "4", "--tp-size", "2", "--dp-size", "2"]

    assert simulate([*words, "--enable-dp-attention"]) == 0

    _, line = capsys.readouterr().out.splitlines()
    assert line.split()[:2] == ["tp=2,dp=2,dp-attention", "2"]


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-algorithm", "NGRAM"],
        ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"],
        ["--rate", "0"],
        ["--requests", "-1"],
        ["--shared-len", "9", "--input-len", "8"],
        ["--hardware", "abacus"],
        ["--layouts", "tp=x"],
    ],
)
def test_a_question_without_sense_is_refused(words):
    with pytest.raises(ConfigError):
        simulate(words)
