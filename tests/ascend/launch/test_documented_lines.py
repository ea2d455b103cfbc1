"""The documents' command lines on Ascend NPUs: the start and `banyan check` give one answer.

`tests/ascend/emulation/test_commands.py` starts them.
"""

from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.main import main
from banyan.config.cli import parse
from banyan.config.env import read_environment
from tests.support.checkpoints import LLAMA, folder
from tests.support.documented_lines import FLAG_FILE, LEFT_OUT, REFUSED_ON_NPU, STARTS

MODELS = {"install page": "deepseek-ai/DeepSeek-R1", "parameter guide": "deepseek-ai/DeepSeek-V3.2"}
INTERFACES = {"HCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}


def started(name: str, soc: str, folder_of_flags: Path) -> tuple[list[str], dict[str, str]]:
    """The words of a start on a chip, and its variables."""
    line, page = STARTS[name], name.partition(":")[0]
    model = MODELS.get(page) or folder(folder_of_flags, LLAMA)
    file = folder_of_flags / "config.yaml"
    file.write_text(FLAG_FILE.replace("path: M", f"path: {model}"))
    meant = {"M": model, "config.yaml": str(file)}
    words = [meant.get(word, word).replace("IP", "192.0.2.7") for word in line.words]
    variables = {
        name: text.replace("IP:PORT", "192.0.2.7:6670") for name, text in line.variables.items()
    }
    variables |= {"BANYAN_NPU": "tests.ascend.emulation", "BANYAN_NPU_SOC": soc}
    if "--attention-backend" not in words:
        words += ["--device", "npu"]
    return [*words, *LEFT_OUT.get(name, ())], variables | INTERFACES


@pytest.mark.parametrize("soc", ["A2", "A3"])
@pytest.mark.parametrize("name", STARTS)
def test_check_and_the_start_agree_on_a_documented_line(
    name: str, soc: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, variables = started(name, soc, tmp_path)
    file = tmp_path / "node.env"
    file.write_text("".join(f"{name}={text}\n" for name, text in variables.items()))
    code = main(["check", *words, "--soc", soc, "--env", str(file)])
    found = capsys.readouterr().out
    if name in REFUSED_ON_NPU:
        with pytest.raises(ConfigError, match=REFUSED_ON_NPU[name]):
            parse(words, read_environment(variables))
        assert code and REFUSED_ON_NPU[name] in found
    else:
        assert parse(words, read_environment(variables)).device.name == "npu"
        assert code == 0, found


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_guides_tables_alone_break_a_rule_that_names_the_ranks(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, variables = started(name, "A3", tmp_path)
    file = tmp_path / "node.env"
    file.write_text("".join(f"{name}={text}\n" for name, text in variables.items()))
    words = words[: -len(LEFT_OUT[name])]
    assert main(["check", *words, "--soc", "A3", "--env", str(file)]) == 1
    assert "ranks" in capsys.readouterr().out
