"""`banyan config --device npu`: what each documented flag comes to on the chip."""

from banyan.cli.main import main
from tests.support.checkpoints import LLAMA, folder


def test_each_documented_flag_is_told_with_its_outcome(npu, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("BANYAN_NPU", "tests.ascend.emulation")
    assert main(["config", folder(tmp_path, LLAMA), "--device", "npu"]) == 0
    chip = "A2" if npu.soc.devices == 8 else "A3"
    out = capsys.readouterr().out
    told = out.partition(f"# Flags on an {chip}")[2].splitlines()
    assert len(told) > 300 and all(line.startswith("#") for line in told[1:])
    found = {line.split()[1]: line for line in told[1:]}
    for flag in ("page-size", "enable-lora", "lora-paths", "max-loaded-loras"):
        assert "works (yes)" in found[flag]
    assert "not applicable (gpu-only)" in found["enable-p2p-check"]
    assert "refused (planned)" in found["enable-deterministic-inference"]
