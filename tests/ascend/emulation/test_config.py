"""`banyan config --device npu` lists the flags that do not work on the chip."""

from banyan.cli.main import main
from tests.support.checkpoints import LLAMA, folder


def test_each_flag_that_does_not_work_is_listed_with_its_outcome(
    npu, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("BANYAN_NPU", "tests.ascend.emulation")
    assert main(["config", folder(tmp_path, LLAMA), "--device", "npu"]) == 0
    chip = "A2" if npu.soc.devices == 8 else "A3"
    out = capsys.readouterr().out
    lines = out.partition(f"# Documented flags on {chip}")[2].splitlines()
    assert len(lines) > 100 and all(line.startswith("#") for line in lines[1:])
    found = {line.split()[1]: line for line in lines[1:]}
    assert "--enable-lora" not in found and "--kv-events-config" not in found
    assert "nothing to do: it tunes links between GPUs" in found["--enable-p2p-check"]
    assert "refused: SGLang plans it" in found["--enable-deterministic-inference"]
    assert "missing: graphs are captured" in found["--enable-piecewise-cuda-graph"]
