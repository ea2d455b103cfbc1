"""A flag without effect next to the others is reported, whatever its value."""

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.rules.conflicts import refuse_conflicts
from banyan.config.rules.ignored import flags_that_need_a_server


def notes(line: str) -> list[str]:
    found = parse(line.split(), Environment()).observe.notes
    return [note for note in found if "has no effect" in note]


@pytest.mark.parametrize(
    ("lonely", "needs"),
    [
        ("--log-requests-format json", "--log-requests"),
        ("--journal-bytes 2000000", "--journal j"),
        ("--schedule-low-priority-values-first", "--enable-priority-scheduling"),
        ("--priority-scheduling-preemption-threshold 3", "--enable-priority-scheduling"),
        ("--disable-priority-preemption", "--enable-priority-scheduling"),
        ("--load-balance-method total_tokens", "--dp 2"),
        ("--revision main demo", "owner/name"),
        ("--download-dir /d pypi:there", "owner/name"),
    ],
)
def test_a_flag_without_the_one_it_needs_is_reported(lonely: str, needs: str) -> None:
    (note,) = notes(lonely)
    assert note.startswith(lonely.split()[0] + " is accepted but has no effect")
    words = [word for word in lonely.split() if word not in ("demo", "pypi:there")]
    assert notes(" ".join([*words, needs])) == []


@pytest.mark.parametrize(
    ("idle", "beside"),
    [
        ("--chat-template chatml", "--skip-tokenizer-init"),
        ("--completion-template star_coder", "--skip-tokenizer-init"),
        ("--tool-call-parser qwen", "--skip-tokenizer-init"),
        ("--reasoning-parser qwen3", "--skip-tokenizer-init"),
        ("--weight-loader-disable-mmap", "--model-impl transformers"),
        ("--weight-loader-disable-mmap", "--load-format dummy"),
        ("--radix-eviction-policy lfu", "--disable-radix-cache"),
        ('--radix-eviction-policy-config {"a":1}', "--disable-radix-cache"),
        ("--constrained-json-disable-any-whitespace", "--grammar-backend none"),
        ("--abort-on-priority-when-disabled", "--enable-priority-scheduling"),
    ],
)
def test_a_flag_that_another_makes_idle_is_reported(idle: str, beside: str) -> None:
    assert notes(idle) == []
    (note,) = notes(f"{idle} {beside}")
    assert note.startswith(idle.split()[0] + " is accepted but has no effect")


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_sizes_of_the_host_tier_count_on_devices_that_have_one(device: str) -> None:
    line = f"--device {device} --hicache-ratio 3"
    assert notes(f"{line} --enable-hierarchical-cache") == []
    (note,) = notes(line)
    assert "there is no host tier without --enable-hierarchical-cache" in note
    (note,) = notes("--device cpu --hicache-ratio 3 --enable-hierarchical-cache")
    assert "the KV cache is in host memory already" in note


def test_what_users_may_not_expect_is_said_at_start() -> None:
    (note,) = parse(["--enable-custom-logit-processor"], Environment()).observe.notes
    assert "code in requests is never run" in note


def test_a_default_is_not_worth_a_line() -> None:
    assert notes("--log-requests-format text --load-balance-method round_robin") == []


def test_functions_that_change_weights_are_refused_where_they_cannot_run() -> None:
    with pytest.raises(
        ConfigError,
        match="--custom-weight-loader cannot be combined with --model-impl transformers",
    ):
        words = ["--custom-weight-loader", "a:b", "--model-impl", "transformers"]
        refuse_conflicts(parse(words, Environment()), None, Environment())


def test_what_only_a_server_gives_is_reported_where_there_is_none() -> None:
    (line,) = flags_that_need_a_server(parse(["--enable-metrics"], Environment()))
    assert "--enable-metrics has no effect" in line
    assert not list(flags_that_need_a_server(parse([], Environment())))
