"""What a flag's value does on a device: the start, `banyan config` and the help give one answer."""

import json
import re
from collections.abc import Iterator

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.main import main
from banyan.config.cli import default_of, help_text, parse, value_of
from banyan.config.env import Environment, NpuWishes, read_environment
from banyan.config.flags.flag import FLOAT, FLOATS, INT, INTS, JSON, SWITCH, WORDS, Flag, Form
from banyan.config.flags.outcome import (
    DEVICES,
    MISSING,
    NOTHING,
    REFUSED,
    WORKS,
    OutcomeRow,
    counts,
    outcome_of,
    outcome_rows,
)
from banyan.config.flags.table import find, known_flags
from tests.support.cases import check_each
from tests.support.checkpoints import LLAMA, folder

ENVIRONMENTS = {
    device: Environment(npu=NpuWishes(driver="tests.ascend.emulation", soc=device))
    for device in ("A2", "A3")
}
SAMPLES = {INT: "3", FLOAT: "0.25", INTS: "3", FLOATS: "3.5", JSON: '{"a": 1}', SWITCH: ""}
TEXTS = {"init-expert-location": "{}", "deepep-mode": "normal", "cpu-activations": "fp32"}


def sample(known: Form, row: OutcomeRow) -> str:
    """A value that the row is about."""
    if row.values and not row.values[0].startswith("!"):
        return row.values[0].partition("..")[0]
    if known.name in TEXTS or not known.choices:
        return TEXTS.get(known.name, SAMPLES.get(known.kind, "text"))
    allowed = [word.removeprefix("!") for word in row.values] if row.values else []
    return next(each for each in known.choices[::-1] if each not in allowed)


def started(row: OutcomeRow, device: str) -> tuple[str, ...]:
    """The notes of a start with the row's flag on a device."""
    known = find(row.flag, abbreviate=False)
    value = sample(known, row)
    name = "npu" if device in ENVIRONMENTS else device
    argv = ["M", "--device", name, f"--{row.flag}", *([value] if value else [])]
    return parse(argv, ENVIRONMENTS.get(device, Environment())).observe.notes


def cases(*verdicts: str) -> list[object]:
    return list(_cases(verdicts))


def _cases(verdicts: tuple[str, ...]) -> Iterator[object]:
    for rows in outcome_rows().values():
        for row in rows:
            if row.outcome.verdict in verdicts:
                for device in row.devices:
                    yield pytest.param(row, device, id=f"{row.flag}-{device}")


@pytest.mark.parametrize(("row", "device"), cases(REFUSED))
def test_a_refused_flag_ends_the_start_with_what_to_use(row: OutcomeRow, device: str) -> None:
    with pytest.raises(ConfigError) as error:
        started(row, device)
    assert row.outcome.why in str(error.value) and row.outcome.use in str(error.value)


@pytest.mark.parametrize(("row", "device"), cases(NOTHING, MISSING))
def test_a_flag_without_effect_is_accepted_with_the_devices_reason(
    row: OutcomeRow, device: str
) -> None:
    (note,) = [note for note in started(row, device) if note.startswith(f"--{row.flag}")]
    assert row.outcome.why in note
    assert ("its feature is missing" in note) == (row.outcome.verdict == MISSING)


@pytest.mark.parametrize("device", DEVICES)
def test_every_documented_flag_is_counted_once(device: str) -> None:
    assert counts(device).total() == 319


def test_a_default_asks_for_nothing_on_any_device() -> None:
    """As every launch script of SGLang gives some."""
    argv = ["--moe-runner-backend", "auto", "--cuda-graph-max-bs", "0", "--tp", "1", "--ep", "1"]
    for device in ("cpu", "cuda"):
        with_default = [*argv[:2], *argv[4:], "--moe-a2a-backend", "none", "--device", device]
        assert all(
            "this is the default" in n for n in parse(with_default, Environment()).observe.notes
        )


def test_values_are_ranges_words_or_all_but_some() -> None:
    page, drafts = (
        find("page-size", abbreviate=False),
        find("speculative-num-draft-tokens", abbreviate=False),
    )
    assert [outcome_of(page, n, "A3").verdict for n in (1, 127, 128, 129, 512, 513)] == [
        *(REFUSED, REFUSED, WORKS, REFUSED, WORKS, REFUSED)
    ]
    assert outcome_of(drafts, 16, "A2").verdict == WORKS
    assert outcome_of(drafts, 17, "A2").verdict == REFUSED
    runner = find("moe-runner-backend", abbreviate=False)
    assert outcome_of(runner, "triton", "cuda").verdict == NOTHING
    assert outcome_of(runner, "cutlass", "cuda").verdict == MISSING


def test_no_two_rows_answer_for_one_value_of_a_device() -> None:
    for rows in outcome_rows().values():
        for row in rows:
            value = sample(find(row.flag, abbreviate=False), row)
            for device in row.devices:
                same = [r for r in rows if device in r.devices and r.covers(value)]
                assert same == [row], (row.flag, device)


def test_the_help_names_the_devices_that_refuse_a_flag() -> None:
    text = " ".join(help_text().split())
    part = text.partition("--speculative-algorithm")[2]
    assert "(cuda, npu: DFLASH refused)" in part.partition("--speculative-num")[0]


@pytest.mark.parametrize("device", DEVICES)
def test_config_lists_what_does_not_work_on_its_device(tmp_path, capsys, device: str) -> None:
    from banyan.cli.config import outcome_lines

    lines = "\n".join(outcome_lines(device))
    dflash = next((line for line in lines.splitlines() if "DFLASH" in line), "")
    assert ("refused" in dflash) == (device != "cpu")
    assert f"{counts(device)[WORKS]} works" in lines.splitlines()[0]
    if device == "cpu":
        assert main(["config", folder(tmp_path, LLAMA), "--device", "cpu"]) == 0
        assert lines.replace("\n", "\n# ") in capsys.readouterr().out


def test_ascend_attention_chooses_the_npu_where_there_is_one() -> None:
    argv = ["M", "--attention-backend", "ascend"]
    assert parse(argv, ENVIRONMENTS["A3"]).device.name == "npu"
    assert parse([*argv, "--device", "cpu"], ENVIRONMENTS["A3"]).device.name == "cpu"


def test_ascend_attention_without_an_npu_is_reported_loudly(monkeypatch) -> None:
    monkeypatch.setattr("banyan.ascend.device_facts.find_soc", lambda: "")
    config = parse(["M", "--attention-backend", "ascend"], read_environment({}))
    assert config.device.name == "auto"
    assert "no Ascend NPU is used" in config.observe.notes[0]


OWN = ("device", "model-path")
"""What every start of the test names."""


@pytest.mark.parametrize("device", DEVICES)
def test_a_start_takes_every_flag_that_works_on_a_device(device: str) -> None:
    """Each with a value that is not its default, alone. What a device or a model cannot do with
    others is refused later, by name."""
    name = "npu" if device in ENVIRONMENTS else device
    environment = ENVIRONMENTS.get(device, Environment())

    def check(flag: Flag) -> None:
        values = [each for each in values_of(flag) if works(flag, each, device)]
        assert values, "no value of it works"
        config = parse(["M", "--device", name, *written(flag, values[0])], environment)
        assert value_of(config, flag) not in (default_of(flag), None)
        mine = [note for note in config.observe.notes if note.startswith(f"--{flag.name} ")]
        assert all(
            outcome.why not in note
            for note in mine
            for row in outcome_rows().get(flag.name, ())
            for outcome in [row.outcome]
        )

    flags = [known for known in known_flags() if isinstance(known, Flag) and known.documented]
    check_each(
        (f for f in flags if outcome_of(f, None, device).verdict == WORKS and f.name not in OWN),
        check,
        lambda flag: flag.name,
    )


def values_of(flag: Flag) -> list[object]:
    """Legal values that are not the default, most likely ones first."""
    default = default_of(flag)
    if flag.kind == SWITCH:
        return [flag.sets]
    if flag.choices:
        return [each for each in flag.choices if each != default]
    if flag.kind in (INT, FLOAT):
        numbers = (2, 3, 1, 256, 2048, 1 << 21) if flag.kind == INT else (0.5, 2.5)
        return [n for n in numbers if n != default and flag.low <= n <= flag.high]
    words = [("a:b", "c:d"), ("{}",), ("custom", "7"), ("q_proj",)]
    several = {INTS: [(1, 2)], FLOATS: [(0.5, 2.0)], JSON: [{"a": "b"}], WORDS: words}
    found = several.get(flag.kind, ["text"])
    return [each for each in found if flag.kind != WORDS or fits(flag, each)]


def fits(flag: Flag, words: object) -> bool:
    assert isinstance(words, tuple)
    return not flag.pattern or all(re.fullmatch(flag.pattern, word) for word in words)


def works(flag: Flag, value: object, device: str) -> bool:
    return outcome_of(flag, value, device).verdict == WORKS


def written(flag: Flag, value: object) -> list[str]:
    if flag.kind == SWITCH:
        return [f"--{flag.name}"]
    if isinstance(value, tuple):
        return [f"--{flag.name}", *map(str, value)]
    return [f"--{flag.name}", json.dumps(value) if isinstance(value, dict) else str(value)]
