"""`banyan check`, and the same rules at a start with --device npu."""

import json
import logging
from pathlib import Path

import pytest

from banyan.ascend.launch.facts import (
    LaunchModel,
    arguments_of_words,
    known_model,
    read_model,
    read_variables,
    rules_page,
)
from banyan.ascend.launch.machine import device_numbers, find_soc, own_interfaces
from banyan.ascend.launch.rules import documented_columns
from banyan.base.errors import ConfigError
from banyan.cli.main import main
from banyan.config.cli import parse
from banyan.config.env import Environment, read_environment
from banyan.config.prepare import prepare
from tests.support.checkpoints import LLAMA, folder

DOCS = Path(__file__).parents[3] / "docs"
NPU = {"BANYAN_NPU": "tests.ascend.emulation", "BANYAN_NPU_SOC": "A2"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return folder(tmp_path, LLAMA)


def test_rules_that_are_kept_end_with_zero(model, capsys) -> None:
    assert main(["check", model, "--device", "npu", "--soc", "A3"]) == 0
    assert "verdict  A3: 0 errors, 0 warnings\n" in capsys.readouterr().out


def test_a_rule_that_is_broken_is_reported_and_ends_with_one(model, capsys) -> None:
    assert main(["check", model, "--page-size", "64", "--soc=A2"]) == 1
    out = capsys.readouterr().out
    assert "--page-size 64" in out and "rule 2a" in out and "A2: 1 errors" in out


def test_what_this_build_has_not_is_reported_and_ends_with_two(model, capsys) -> None:
    code = main(["check", model, "--enable-lmcache", "--soc", "A3"])
    assert code == 2
    assert "is not available in this build" in capsys.readouterr().out


def test_variables_come_from_a_file(model, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("STREAMS_PER_DEVICE", "5")
    file = tmp_path / "node.env"
    file.write_text("# the node\nexport TASK_QUEUE_ENABLE=7\n\nBANYAN_PAGE_SIZE='64'\n")
    assert main(["check", model, "--soc", "A3", "--env", str(file)]) == 1
    out = capsys.readouterr().out
    assert "TASK_QUEUE_ENABLE=7" in out and "--page-size 64" in out
    assert "STREAMS_PER_DEVICE" not in out


@pytest.mark.parametrize(
    ("text", "says"),
    [("what is this", "line 1: 'what is this' is not NAME=VALUE"), ("A" * 70_000, "larger than")],
)
def test_a_file_that_has_no_variables_is_refused(tmp_path, text, says) -> None:
    file = tmp_path / "node.env"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_variables(str(file))


def test_a_chip_that_nobody_knows_is_refused(model) -> None:
    assert main(["check", model, "--soc", "A9"]) == 2
    assert main(["check", model, "--soc"]) == 2


def test_flags_are_read_as_a_start_reads_them(tmp_path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("page_size: 64\nport: 1\nenable-deepep-moe: true\n")
    environment = read_environment({"BANYAN_PORT": "2", "BANYAN_PAGE_SIZE": "128"})
    found = arguments_of_words(["M", "--config", str(file), "--tp", "4", "--port=3"], environment)
    assert found == {
        "model-path": "M",
        "page-size": 128,
        "port": 3,
        "moe-a2a-backend": "deepep",
        "tensor-parallel-size": 4,
    }


def test_a_start_on_npu_that_breaks_a_rule_is_refused_before_a_model_is_looked_for() -> None:
    config = parse(["./no-such-model", "--device", "npu", "--page-size", "256"], Environment())
    with pytest.raises(ConfigError, match=r"--page-size 256.*\[2b"):
        prepare(config, read_environment(NPU | {"SGLANG_USE_FIA_NZ": "1"}))


def test_a_start_on_npu_is_held_against_the_variables(model) -> None:
    config = parse([model, "--device", "npu"], Environment())
    with pytest.raises(ConfigError, match=r"TASK_QUEUE_ENABLE=4"):
        prepare(config, read_environment(NPU | {"TASK_QUEUE_ENABLE": "4"}))
    cpu = parse([model, "--device", "cpu"], Environment())
    prepare(cpu, read_environment(NPU | {"TASK_QUEUE_ENABLE": "4"}))


def test_a_start_on_npu_is_held_against_the_facts_of_the_model(model) -> None:
    config = parse([model, "--device", "npu"], Environment())
    with pytest.raises(ConfigError, match="has no latent attention"):
        prepare(config, read_environment(NPU | {"SGLANG_NPU_USE_MLAPO": "1"}))


def test_a_warning_is_logged_once_and_the_start_goes_on(model, caplog) -> None:
    config = parse([model, "--device", "npu"], Environment())
    with caplog.at_level(logging.WARNING):
        prepare(config, read_environment(NPU | {"STREAMS_PER_DEVICE": "16"}))
    lines = [r.getMessage() for r in caplog.records if "STREAMS_PER_DEVICE" in r.getMessage()]
    assert len(lines) == 1 and "[12a" in lines[0]


def test_variables_of_the_devices_libraries_have_no_effect_elsewhere_only(model) -> None:
    environment = read_environment({"HCCL_BUFFSIZE": "400", "TASK_QUEUE_ENABLE": "1"})
    elsewhere = parse([model, "--device", "cpu"], environment).observe.notes
    assert len([note for note in elsewhere if "is set but has no effect" in note]) == 2
    assert parse([model, "--device", "npu"], environment).observe.notes == ()


def test_the_page_of_the_rules_is_what_the_table_says() -> None:
    assert (DOCS / "ascend_rules.md").read_text(encoding="utf-8") == rules_page()


def test_the_documents_have_a_column_for_each_flag() -> None:
    for soc in ("A2", "A3"):
        columns = documented_columns(soc)
        assert columns["page-size"] == "yes" and columns["enable-p2p-check"] == "gpu-only"
        assert columns["enable-deterministic-inference"] == "planned" and len(columns) > 300


def test_a_flag_that_ends_the_start_on_the_chip_is_printed_as_refused(model, capsys) -> None:
    """With what to use; the exit code says that the build does not start it."""
    given = ["--soc", "A3", "--speculative-num-draft-tokens", "17", "--enable-piecewise-cuda-graph"]
    assert main(["check", model, *given]) == 2
    out = capsys.readouterr().out
    assert "build    --speculative-num-draft-tokens 17" in out and "give 16 or less" in out
    assert "ignored  --enable-piecewise-cuda-graph: missing: graphs are captured of decode" in out


def test_facts_of_a_model_are_read_from_its_folder_or_known_by_its_name(tmp_path) -> None:
    facts = {
        **{"hidden_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"kv_lora_rank": 16, "q_lora_rank": 24, "index_topk": 4, "num_nextn_predict_layers": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    (tmp_path / "quant_model_description.json").write_text("{}")
    assert read_model(str(tmp_path)) == LaunchModel(
        *(tmp_path.name, 64, 8, 2, 0, True, 24, True, 1), is_modelslim=True
    )
    assert read_model(str(tmp_path / "nowhere")) is None
    found = known_model("org/DeepSeek-V3.2-Exp-W8A8/")
    assert found is not None and found.is_sparse and found.is_modelslim is None
    assert known_model("org/other") is None


def test_the_chip_is_read_from_the_bus_or_inferred_from_the_devices(tmp_path) -> None:
    assert find_soc(str(tmp_path)) == ""
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in (*(f"davinci{n}" for n in range(8)), "davinci_manager"):
        (dev / name).touch()
    assert device_numbers(str(tmp_path)) == list(range(8))
    assert find_soc(str(tmp_path)) == "A2"
    (dev / "davinci8").touch()
    assert find_soc(str(tmp_path)) == "A3"
    model_config = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    model_config.mkdir(parents=True)
    (model_config / "vendor").write_text("0x19e5\n")
    (model_config / "device").write_text("0xd802\n")
    assert find_soc(str(tmp_path)) == "A2"


def test_this_machine_has_a_loop_to_itself() -> None:
    assert ("127.0.0.1",) in own_interfaces().values()
