"""`banyan doctor --device npu` on machines that are played: each fact right, and each one wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from banyan.ascend.launch.facts import SOCS, sentences
from banyan.ascend.launch.machine import Box, Check, examine, npu_doctor, pairs, this_box, verdict
from banyan.cli.main import main

RELEASES = {"torch": "2.9.0+cpu", "torch-npu": "2.9.0"}
SYSTEM = {
    "proc/sys/vm/swappiness": "0\n",
    "proc/sys/kernel/numa_balancing": "0\n",
    "proc/sys/kernel/sched_migration_cost_ns": "50000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "usr/local/Ascend/driver/version.info": "Version=25.5.0\nascendhal_version=7.35.23\n",
    "usr/local/Ascend/firmware/version.info": "Version=7.8.0.5.216\n",
    "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info": (
        "package_name=Ascend-cann-toolkit\nversion=8.5.0\n"
    ),
    "dev/davinci_manager": "",
    "dev/devmm_svm": "",
    "dev/hisi_hdc": "",
}


def box_of(
    root: Path, soc: str, files: dict[str, str | None] | None = None, **other: object
) -> Box:
    """A machine that is set up as it should be, but for what is named."""
    devices = {f"dev/davinci{number}": "" for number in range(SOCS[soc].devices)}
    for name, text in {**SYSTEM, **devices, **(files or {})}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    whole = Box(
        root=str(root),
        versions=lambda package: RELEASES.get(package, ""),
        variables={"ASCEND_TOOLKIT_HOME": "/usr/local/Ascend/ascend-toolkit/latest"},
        python="3.11.9",
        cores=192,
        memlock=-1,
        shared_gib=16.0,
    )
    return replace(whole, **other)


def releases(**versions: str):
    return lambda package: {**RELEASES, **versions}.get(package, "")


PINNED = {"ASCEND_HOME_PATH": "/x", "SGLANG_SET_CPU_AFFINITY": "1"}
WRONG = {
    "23a": ({"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"}, {}, "powersave"),
    "23b": ({"proc/sys/vm/swappiness": "60"}, {}, "60"),
    "23c": ({"proc/sys/kernel/numa_balancing": "1"}, {}, "1"),
    "23d": ({"proc/sys/kernel/sched_migration_cost_ns": "500000"}, {}, "500000"),
    "23e": ({}, {"python": "3.14.0"}, "3.10 to 3.13"),
    "23f": ({}, {"versions": releases(torch="2.13.0")}, "torch==2.9.*"),
    "23g": ({"dev/davinci0": None}, {}, "of"),
    "23h": ({"dev/hisi_hdc": None}, {}, "/dev/hisi_hdc"),
    "23i": (dict.fromkeys(["usr/local/Ascend/driver/version.info"]), {}, "--volume"),
    "23j": ({}, {"shared_gib": 0.0625}, "--shm-size 16g"),
    "23k": ({}, {"variables": {}}, "set_env.sh"),
    "23l": ({}, {"memlock": 65536}, "65,536 bytes"),
    "23m": (
        {},
        {"variables": {"ASCEND_HOME_PATH": "/x", "SGLANG_SET_CPU_AFFINITY": "1"}, "cores": 4},
        "4",
    ),
    "23n": ({}, {"versions": releases(**{"torch-npu": "2.9.0.post2"})}, "CANN 9.0"),
    "23o": ({}, {"versions": releases(**{"torch-npu": "2.9.7"})}, "2.12.0.post2 with 9.1"),
    "23p": ({}, {"versions": releases(**{"torch-npu": ""})}, "torch-npu==2.9.*"),
}


def rules(checks: list[Check]) -> list[str]:
    return [check.finding.rule for check in checks if check.finding is not None]


def test_every_line_of_the_table_about_machines_has_a_case() -> None:
    assert set(WRONG) == {rule for rule in sentences() if rule.startswith("23")}


@pytest.mark.parametrize("soc", SOCS)
def test_a_machine_that_is_set_up_has_nothing_wrong(tmp_path: Path, soc: str) -> None:
    box = box_of(tmp_path, soc)
    checks = examine(box, SOCS[soc])
    assert rules(checks) == []
    values = {check.name: check.value for check in checks}
    assert values["driver"] == "25.5.0" and values["firmware"] == "7.8.0.5.216"
    assert values["CANN"] == "8.5.0" and values["/dev/davinci*"] == str(SOCS[soc].devices)
    assert verdict(checks, box).startswith("a supported pair: torch 2.9.0+cpu, torch_npu 2.9.0")


@pytest.mark.parametrize("rule", WRONG)
def test_what_is_wrong_is_reported_with_its_value_and_what_puts_it_right(
    tmp_path: Path, rule
) -> None:
    files, other, says = WRONG[rule]
    soc = SOCS["A2"]
    (found,) = [
        check for check in examine(box_of(tmp_path, "A2", files, **other), soc) if check.finding
    ]
    assert found.finding is not None and found.finding.rule == rule
    assert says in found.finding.line
    assert found.finding.severity == sentences()[rule].severity


def test_what_the_kernel_does_not_show_is_no_fault(tmp_path: Path) -> None:
    hidden = dict.fromkeys(name for name in SYSTEM if name.startswith(("proc/", "sys/")))
    checks = examine(box_of(tmp_path, "A3", hidden), SOCS["A3"])
    assert rules(checks) == []
    assert {check.value for check in checks if check.name == "sched_migration_cost_ns"} == {
        "not exposed"
    }


def test_newer_kernels_have_the_migration_cost_in_another_place(tmp_path: Path) -> None:
    files = {
        "proc/sys/kernel/sched_migration_cost_ns": None,
        "sys/kernel/debug/sched/migration_cost_ns": "1",
    }
    checks = examine(box_of(tmp_path, "A3", files), SOCS["A3"])
    (found,) = [check for check in checks if check.finding]
    assert found.finding is not None and "> /sys/kernel/debug/sched" in found.finding.use


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("usr/local/Ascend/cann/version.cfg", "runtime_running_version=[8.5.0.1:8.5.0]\n", "8.5.0"),
        ("opt/cann/version.cfg", "toolkit_running_version=[7.6.0.1.220:8.2.RC1]\n", "8.2.RC1"),
    ],
)
def test_cann_is_found_where_its_releases_put_it(tmp_path: Path, name, text, version) -> None:
    old = "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"
    home = {"ASCEND_HOME_PATH": "/opt/cann"}
    assert box_of(tmp_path, "A3", {old: None, name: text}, variables=home).cann == version


def test_memory_may_be_bounded_where_devices_reach_each_other(tmp_path: Path) -> None:
    box = box_of(tmp_path, "A3", memlock=65536)
    assert rules(examine(box, SOCS["A3"])) == []


def test_a_pair_that_does_not_fit_is_the_verdict(tmp_path: Path) -> None:
    box = box_of(tmp_path, "A3", versions=releases(**{"torch-npu": "2.9.0.post2"}))
    checks = examine(box, SOCS["A3"])
    assert verdict(checks, box).startswith("no supported pair: ")
    assert verdict(checks, box).endswith("1 errors, 0 warnings")


def test_the_table_of_pairs_has_each_release_once() -> None:
    names = [pair.package for pair in pairs()]
    assert len(names) == len(set(names)) > 20


@pytest.mark.parametrize("soc", SOCS)
def test_the_table_is_printed_with_wanted_values_and_commands(tmp_path: Path, soc, capsys) -> None:
    files = {"proc/sys/vm/swappiness": "60"}
    assert npu_doctor("", box_of(tmp_path, soc, files)) is False
    out = capsys.readouterr().out
    assert f"Ascend NPU               {soc}\n" in out
    assert "vm.swappiness            60 (wanted: 0)" in out
    assert "warning: run: sysctl -w vm.swappiness=0" in out


def test_this_machine_can_be_asked(capsys) -> None:
    assert main(["doctor", "--device", "npu", "--soc", "A2"]) in (0, 1)
    assert "(wanted: 8)" in capsys.readouterr().out
    assert this_box({}).cores > 0
    assert main(["doctor", "--device", "tpu"]) == 2
