"""The router's command line: every flag lands where it belongs, and nothing is ignored."""

from collections.abc import Sequence

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.router import help_text, read_flags
from banyan.config.flags.flag import COMMAS, FLOAT, FLOATS, INT, SWITCH, WORDS, Flag
from banyan.router.config import RouterConfig, WorkerSpec
from banyan.router.flags import GROUPS, IDLE, REFUSED
from tests.support.cases import check_each

FLAGS = [flag for _, flags in GROUPS for flag in flags]
SPECIAL = ("worker-urls", "prefill", "decode", "prefill-bootstrap-ports", "dp-size")
PAIRED = ("prefill-policy", "decode-policy")


def read(*words: str, variables: dict[str, str] | None = None) -> RouterConfig:
    def check(flags: Sequence[str]) -> None:
        if "--no-such-flag" in flags:
            raise ConfigError("unknown flag --no-such-flag")

    return read_flags(words, variables or {}, check)


def value_of(config: RouterConfig, flag: Flag) -> object:
    part, _, name = flag.field.partition(".")
    return getattr(getattr(config, part), name)


def word_for(flag: Flag) -> str:
    if flag.choices:
        return flag.choices[-1]
    if flag.kind in (INT, FLOAT, FLOATS):
        return str(int(max(flag.low, 1)) + 6 if flag.high > 10 else 0.5)
    return "/x" if flag.name == "health-check-endpoint" else "x"


def test_each_flag_changes_its_field_in_every_spelling() -> None:
    def check(flag: Flag) -> None:
        also = ("--pd-disaggregation",) if flag.name in PAIRED else ()
        words = () if flag.kind == SWITCH else (word_for(flag),)
        default = value_of(read(*also), flag)
        found = {value_of(read(f"--{name}", *words, *also), flag) for name in flag.names}
        assert len(found) == 1 and default not in found
        underscored = f"--router-{flag.name}".replace("-", "_").replace("__", "--", 1)
        assert {value_of(read(underscored, *words, *also), flag)} == found
        if flag.kind in (FLOAT, INT):
            with pytest.raises(ConfigError, match=flag.name):
                read(f"--{flag.name}", "many", *also)

    check_each([f for f in FLAGS if f.name not in SPECIAL], check, lambda f: f.name)


def test_a_flag_comes_from_the_environment_and_the_command_line_wins() -> None:
    variables = {"api-key": "k", "port": "5", "page-size": "3"}
    config = read("--port", "6", variables=variables)
    assert (config.server.api_key, config.server.port) == ("k", 6)


def test_pauses_are_given_in_milliseconds() -> None:
    assert read("--retry-initial-backoff-ms", "20").retry.first_pause_s == 0.02


def test_workers_are_named_by_url() -> None:
    config = read("--worker-urls", "http://a:1/", "https://[::1]:2")
    assert config.pool.workers == (WorkerSpec("http://a:1"), WorkerSpec("https://[::1]:2"))


@pytest.mark.parametrize(
    "line",
    [
        "--prefill http://p:1 8998 --prefill http://q:1 none --decode http://d:1 --decode http://e:1",
        "--prefill http://p:1 8998 http://q:1 --decode http://d:1 http://e:1",
    ],
)
def test_prefill_servers_have_bootstrap_ports(line: str) -> None:
    workers = read("--pd-disaggregation", *line.split()).pool.workers
    assert workers == (
        WorkerSpec("http://p:1", "prefill", 8998),
        WorkerSpec("http://q:1", "prefill"),
        WorkerSpec("http://d:1", "decode"),
        WorkerSpec("http://e:1", "decode"),
    )


def test_bootstrap_ports_may_be_named_on_their_own() -> None:
    line = "--pd-disaggregation --prefill http://p:1 http://q:1 --prefill-bootstrap-ports 5 6"
    assert [w.bootstrap_port for w in read(*line.split()).pool.workers] == [5, 6]


@pytest.mark.parametrize(
    ("line", "culprit"),
    [
        ("--worker-urls ftp://x", "no address"),
        ("--worker-urls http://x/path", "no address"),
        ("--worker-urls http://user:key@x", "no address"),
        ("--worker-urls http://x:1 http://x:1", "twice"),
        ("--worker-urls", "needs a value"),
        ("--prefill http://x", "--pd-disaggregation"),
        ("--pd-disaggregation --worker-urls http://x", "--prefill"),
        ("--pd-disaggregation --prefill 8998", "before its bootstrap port"),
        ("--pd-disaggregation --prefill http://x 99999", "no port"),
        ("--pd-disaggregation --prefill http://x --prefill-bootstrap-ports 1 2", "2 --prefill"),
        ("--prefill-policy random", "--pd-disaggregation"),
        ("--pd-disaggregation --model-path M", "--disaggregation-mode"),
        ("--model-path M --worker-urls http://x", "starts servers"),
        ("--model-path M --no-such-flag", "--no-such-flag"),
        ("--worker-url http://x", "--worker-urls"),
        ("http://x", "--worker-urls"),
        ("--policy prefix_hash", "no such policy"),
        ("--policy best", "must be one of"),
        ("--cache-threshold 2", "[0, 1]"),
        ("--health-check-endpoint health", "must be a path"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(line: str, culprit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*line.split())
    assert culprit in str(caught.value)


def test_a_flag_that_others_have_is_refused_by_name() -> None:
    def check(name: str) -> None:
        with pytest.raises(ConfigError, match=f"--{name} is not available in this build: "):
            read(f"--{name}", "x")

    check_each(REFUSED, check, str)


@pytest.mark.parametrize("name", IDLE)
def test_a_flag_with_nothing_to_do_leaves_a_line(name: str) -> None:
    (note,) = read(f"--{name}").observe.notes
    assert note.startswith(f"--{name} is accepted but has no effect: ")


def test_help_names_every_flag_and_is_no_wider_than_a_terminal() -> None:
    text = help_text()
    assert all(f"--{flag.name}" in text for flag in FLAGS)
    assert max(map(len, text.splitlines())) <= 98


def test_kinds_that_take_lists_are_known() -> None:
    assert {flag.kind for flag in FLAGS} - {
        WORDS,
        COMMAS,
        INT,
        FLOAT,
        FLOATS,
        SWITCH,
        "text",
    } == set()
