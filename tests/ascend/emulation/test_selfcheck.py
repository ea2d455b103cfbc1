"""`banyan npu-selfcheck` on the emulated device."""

import torch

from banyan.ascend.selfcheck import cases
from banyan.cli.main import main


def test_every_case_is_as_on_the_host(npu, capsys, monkeypatch) -> None:
    monkeypatch.setenv("BANYAN_NPU", "tests.ascend.emulation")
    assert main(["npu-selfcheck"]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(list(cases()))
    assert lines[0].startswith(npu.soc.device_name) and torch.__version__ in lines[0]
    assert sum(" ok " in line for line in lines) == count
    assert lines[-1] == f"verdict: {count} of {count} cases are as on the host"
