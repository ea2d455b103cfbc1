import dataclasses
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse, value_of
from banyan.config.env import Environment, read_environment
from banyan.config.flags.flag import SWITCH, Flag
from banyan.config.flags.table import Known, known_flags
from banyan.config.schema import Config
from tests.support.cases import check_each

NOTHING = Environment()


def written(folder: Path, text: str) -> str:
    path = folder / "flags.yaml"
    path.write_text(text)
    return str(path)


def notes(*argv: str) -> tuple[str, ...]:
    return parse(argv, NOTHING).observe.notes


def test_no_flags_give_the_defaults() -> None:
    assert parse([], NOTHING) == Config()


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 1\nhost: 127.0.0.2\npage-size: 32\n")
    variables = read_environment({"BANYAN_PORT": "2", "BANYAN_HOST": "127.0.0.3"})
    config = parse(["--config", file, "--port", "3"], variables)
    assert (config.server.port, config.server.host, config.cache.page_size) == (3, "127.0.0.3", 32)


def test_a_switch_turned_off_on_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "disable-radix-cache: true\ndisable-overlap-schedule: true\n")
    assert parse(["--config", file], NOTHING).schedule.depth == 1
    off = ["--config", file, "--disable-radix-cache=false", "--disable-overlap-schedule=false"]
    config = parse(off, NOTHING)
    assert (config.cache.disable_radix, config.schedule.depth) == (False, Config().schedule.depth)


@pytest.mark.parametrize("argv", [["here"], ["--model", "here"], ["--model-path=here"]])
def test_the_model_is_named_by_word_or_by_flag(argv: list[str]) -> None:
    assert parse(argv, NOTHING).model.source == "here"


def test_underscores_and_dashes_are_equal() -> None:
    assert parse(["--max_running_requests", "7"], NOTHING).schedule.max_running == 7


def test_the_last_of_two_equal_spellings_wins() -> None:
    assert parse(["--port", "1", "--port", "2"], NOTHING).server.port == 2


def test_two_spellings_that_disagree_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--tp-size and --tp disagree"):
        parse(["--tp-size", "2", "--tp", "4"], NOTHING)
    assert parse(["--tp-size", "2", "--tp", "2"], NOTHING).parallel.tp == 2


def test_a_switch_and_a_number_of_one_field_may_not_disagree() -> None:
    switch, number = "--disable-priority-preemption", "--priority-scheduling-preemption-threshold"
    with pytest.raises(ConfigError, match=f"{switch} and {number} disagree"):
        parse([switch, number, "5"], NOTHING)
    assert parse([f"{switch}=false", number, "5"], NOTHING).schedule.preemption_gap == 5
    assert parse([number, "5", f"{switch}=false"], NOTHING).schedule.preemption_gap == 5
    assert parse([switch], NOTHING).schedule.preemption_gap == 0


def test_a_beginning_that_one_documented_flag_has_is_read_as_it_and_reported() -> None:
    config = parse(["--context-len", "128"], NOTHING)
    assert config.model.context_length == 128
    assert config.observe.notes == ("--context-len is read as --context-length",)


def test_a_beginning_that_several_flags_have_is_refused_with_their_names() -> None:
    with pytest.raises(ConfigError, match=r"ambiguous: .*--max-queued-requests"):
        parse(["--max-q", "1", "--max", "1"], NOTHING)


@pytest.mark.parametrize("own", ["--drain-time", "--cpu-act", "--strict"])
def test_flags_of_this_house_are_not_abbreviated(own: str) -> None:
    with pytest.raises(ConfigError, match="unknown flag"):
        parse([own, "1"], NOTHING)


def test_files_do_not_abbreviate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown flag --context-len"):
        parse(["--config", written(tmp_path, "context-len: 5")], NOTHING)


def test_an_unknown_flag_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown flag --prot.*Did you mean --port"):
        parse(["--prot", "1"], NOTHING)


@pytest.mark.parametrize(
    "argv",
    [
        ["--dcp-size", "2"],
        ["--enable-pd-role-switch"],
        ["--enable-return-indexer-topk"],
    ],
)
def test_a_flag_that_this_build_lacks_is_refused_by_name(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"{argv[0]}( \S+)? is not available in this build"):
        parse(argv, NOTHING)


def test_a_replaced_switch_is_read_as_its_successor() -> None:
    (note, why) = notes("--enable-triton-kernel-moe")
    assert note == "--enable-triton-kernel-moe is an old name of --moe-runner-backend triton_kernel"
    assert "accepted but has no effect" in why
    assert parse(["--enable-deepep-moe"], NOTHING).experts.a2a == "deepep"


def test_a_replaced_switch_and_its_successor_may_not_disagree() -> None:
    argv = ["--enable-triton-kernel-moe", "--moe-runner-backend", "cutlass"]
    with pytest.raises(ConfigError, match="--enable-triton-kernel-moe and --moe-runner-backend"):
        parse(argv, NOTHING)
    assert notes(*argv[:2], "triton_kernel")


def test_all_that_is_refused_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--encoder-only", "--enable-http2", "--encoder-urls", "a", "b"], NOTHING)
    assert "--encoder-only, --encoder-urls are not available in this build: " in str(caught.value)
    assert "--enable-http2 is not available in this build: the server" in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--dcp-size", "1"],
        ["--disaggregation-decode-tp", "1"],
        ["--enable-pdmux=false"],
        ["--elastic-ep-backend", "none"],
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted_with_one_line(argv: list[str]) -> None:
    (note,) = notes(*argv)
    assert argv[0].partition("=")[0] in note


def test_a_harmless_flag_is_accepted_with_the_reason() -> None:
    assert notes("--enable-profile-cuda-graph") == (
        "--enable-profile-cuda-graph is accepted but has no effect: there are no device graphs to "
        "tune; steps of every size are recorded at start",
    )


@pytest.mark.parametrize("argv", [["--deepep-v2-mode", "hybrid"], ["--flexkv-config-file", "x"]])
def test_a_flag_of_an_absent_feature_is_accepted_and_says_so(argv: list[str]) -> None:
    (note,) = notes(*argv)
    assert f"{argv[0]} is accepted but has no effect: its feature is missing" in note


@pytest.mark.parametrize(
    "argv",
    [
        ["--lora-backend", "nonsense"],
        ["--cuda-graph-max-bs", "-4"],
        ["--cuda-graph-bs", "x"],
        ["--disaggregation-transfer-backend", "foo"],
        ["--speculative-num-steps", "many"],
    ],
)
def test_a_flag_without_an_effect_still_takes_only_its_own_values(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{argv[0]} must be .*{argv[1]}"):
        parse(argv, NOTHING)


@pytest.mark.parametrize(
    "given",
    [
        "--cuda-graph-bs 1 2 4",
        "--bucket-e2e-request-latency 0.5 1 2",
        "--lora-target-modules q_proj all",
        "--custom-weight-loader mine:function yours:function",
        "--page-size 32",
        "--schedule-policy lpm",
        "--chat-template chatml",
    ],
)
def test_a_flag_leaves_the_model_that_follows_its_values(given: str) -> None:
    assert parse([*given.split(), "./my-model"], NOTHING).model.source == "./my-model"


def test_a_list_takes_its_words_up_to_the_next_flag() -> None:
    config = parse(["--custom-weight-loader", "a:b", "c:d", "--port", "5"], NOTHING)
    assert (config.model.loader_functions, config.server.port) == (("a:b", "c:d"), 5)


def test_a_list_of_any_words_does_not_guess_which_one_is_the_model() -> None:
    given = ["--allowed-media-domains", "a.org", "./my-model"]
    with pytest.raises(ConfigError, match="may be the model.*--model-path"):
        parse(given, NOTHING)
    assert parse(["here", *given], NOTHING).model.source == "here"
    assert parse([*given, "--model", "here"], NOTHING).model.source == "here"


@pytest.mark.parametrize(
    ("argv", "culprit"),
    [
        (["--mem-fraction-static", "0.7", "0.8"], "--mem-fraction-static does not take '0.8'"),
        (["--page-size", "16", "32"], "--page-size does not take '32'"),
        (["--cuda-graph-bs", "1", "2.5"], "--cuda-graph-bs does not take '2.5'"),
        (["--schedule-policy", "fcfs", "lpm"], "--schedule-policy does not take 'lpm'"),
    ],
)
def test_a_second_value_is_not_the_model(argv: list[str], culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        parse(argv, NOTHING)


SWITCHES = [flag for flag in known_flags() if flag.kind == SWITCH]


def test_a_switch_takes_true_and_false_as_a_word_behind_it() -> None:
    off = parse(["here"], NOTHING)
    forms = [(form, word) for word in ("false", "False", "no", "0") for form in (" ", "=")]

    def check(flag: Known) -> None:
        """Switches take turns at the forms."""
        form, word = forms[SWITCHES.index(flag) % len(forms)]
        config = parse([*f"--{flag.name}{form}{word}".split(), "here"], NOTHING)
        assert dataclasses.replace(config, observe=Config().observe) == off
        if isinstance(flag, Flag):
            on = parse([f"--{flag.name}", "here"], NOTHING)
            assert parse([f"--{flag.name}", "true", "here"], NOTHING) == on
            assert value_of(on, flag) == flag.sets and on.model.source == "here"

    check_each(SWITCHES, check, lambda flag: flag.name)


def test_a_model_behind_a_switch_stays_the_model() -> None:
    config = parse(["--log-requests", "./true"], NOTHING)
    assert (config.model.source, config.observe.log_requests) == ("./true", True)


def test_of_several_files_a_later_one_wins(tmp_path: Path) -> None:
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    files[0].write_text("port: 1\npage-size: 32\n")
    files[1].write_text("port: 2\n")
    one, two = map(str, files)
    config = parse(["--config", one, "--config", two], NOTHING)
    assert (config.server.port, config.cache.page_size) == (2, 32)
    assert parse(["--config", two, "--config", one], NOTHING).server.port == 1
    named = read_environment({"BANYAN_CONFIG": one})
    config = parse(["--config", two], named)
    assert (config.server.port, config.cache.page_size) == (2, 32)


def test_a_file_that_names_another_says_how_to_give_two(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="once for each file"):
        parse(["--config", written(tmp_path, "config: other.yaml")], NOTHING)


def test_scalars_of_a_file_may_be_texts(tmp_path: Path) -> None:
    text = "port: '30001'\nlog-requests: 'true'\nmax-lora-chunk-size: '16'\nwarmups: [a, b]\n"
    config = parse(["--config", written(tmp_path, text)], NOTHING)
    assert (config.server.port, config.observe.log_requests) == (30001, True)
    assert config.server.warmups == "a,b"


@pytest.mark.parametrize(
    "line",
    [
        "enable-pdmux: false",
        "encoder-urls: []",
        "decode-context-parallel-size: 1",
    ],
)
def test_a_file_may_hold_the_default_of_what_is_absent(line: str, tmp_path: Path) -> None:
    (note,) = notes("--config", written(tmp_path, line))
    assert line.partition(":")[0] in note and "is the default" in note


def test_all_illegal_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="--page-size must be.*--port must be"):
        parse(["--page-size", "x", "--port", "y"], NOTHING)


@pytest.mark.parametrize(
    "argv", ["--load-format layered", "--log-level critical", "--load-balance-method auto"]
)
def test_a_value_of_another_name_is_reported(argv: str) -> None:
    assert notes(*argv.split())[0].startswith(f"{argv} is read as ")


@pytest.mark.parametrize(
    ("argv", "instead"),
    [
        ("--quantization nvfp4_online", "int8"),
        ("--quantization mlx_q4", "q4_0 or q4_1 for 4 bits"),
        ("--kv-cache-dtype fp4_e2m1", "int8"),
        ("--device xpu", "CPU"),
        ("--device tpu", "CPU"),
        ("--load-format sharded_state", "safetensors"),
        ("--schedule-policy priority", "--enable-priority-scheduling"),
    ],
)
def test_a_value_that_this_build_lacks_is_refused_with_a_reason(argv: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"{argv} is not available.*{instead}"):
        parse(argv.split(), NOTHING)


def test_an_empty_variable_is_not_set() -> None:
    assert parse([], read_environment({"BANYAN_API_KEY": ""})) == Config()


def test_an_absent_flag_does_not_swallow_the_model() -> None:
    assert parse(["--pp-size", "1", "here"], NOTHING).model.source == "here"


def test_an_old_name_works_and_is_reported() -> None:
    config = parse(["--stream-output"], NOTHING)
    assert config.server.incremental_output
    assert config.observe.notes == (
        "--stream-output is an old name of --incremental-streaming-output",
    )


@pytest.mark.parametrize("argv", [["--port"], ["--port", "--host", "x"], ["--port="]])
def test_a_flag_without_its_value_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--port needs a value"):
        parse(argv, NOTHING)


def test_a_value_may_be_negative() -> None:
    assert parse(["--chunked-prefill-size", "-1"], NOTHING).schedule.chunk_tokens == -1


def test_a_second_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="unexpected argument 'b'"):
        parse(["a", "b"], NOTHING)


def test_variables_without_an_effect_are_reported_by_name_only() -> None:
    variables = read_environment({"SGLANG_IS_IN_CI": "secret", "BANYAN_PROT": "secret"})
    lines = parse([], variables).observe.notes
    assert len(lines) == 2 and "SGLANG_IS_IN_CI" in lines[1] and "BANYAN_PROT" in lines[0]
    assert not any("secret" in line for line in lines)


def test_an_illegal_variable_is_refused_by_its_own_name() -> None:
    with pytest.raises(ConfigError, match="BANYAN_PORT must be a whole number"):
        parse([], read_environment({"BANYAN_PORT": "x"}))
