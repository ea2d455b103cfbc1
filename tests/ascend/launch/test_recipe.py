"""`banyan recipe`: the documents' recipes byte by byte, and every file as what it is for."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from banyan.ascend.launch.facts import SOCS, arguments_of_words, read_variables
from banyan.ascend.launch.files import files_of, host_settings
from banyan.ascend.launch.plan import LaunchPlan, Wish, check_plan, lines_of, make_plan
from banyan.base.errors import ConfigError
from banyan.cli.main import main
from banyan.config.env import Environment

GOLDEN = Path(__file__).parent / "golden"
DEPLOY = Path(__file__).parents[3] / "deploy" / "npu"
DOCS = Path(__file__).parents[3] / "docs" / "ascend.md"
V32 = {
    "model": "/models/DeepSeek-V3.2-W8A8",
    "nodes": {
        "prefill": ["192.0.2.11", "192.0.2.12"],
        "decode": ["192.0.2.21", "192.0.2.22"],
    },
    "interface": "eth0",
}
R1 = {
    "model": "/models/DeepSeek-R1-W8A8",
    "nodes": {"prefill": ["192.0.2.11"], "decode": ["192.0.2.21"]},
}
PLANS = {"deepseek-v3.2": V32, "deepseek-r1": R1}

GUIDE = (
    "--trust-remote-code --attention-backend ascend --page-size 128 --moe-a2a-backend deepep "
    "--moe-dense-tp-size 1 --quantization modelslim --speculative-algorithm NEXTN "
    "--speculative-eagle-topk 1 --tokenizer-worker-num 4 --load-balance-method round_robin "
)
PAGE = (
    "--trust-remote-code --attention-backend ascend --mem-fraction-static 0.8 "
    "--quantization w8a8_int8 --tp-size 16 --dp-size 1 "
)
ALL = (
    "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True STREAMS_PER_DEVICE=32 "
    "SGLANG_SET_CPU_AFFINITY=1 "
)
DISPATCH = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK="
DOCUMENTED = {
    ("deepseek-v3.2", "prefill"): (
        GUIDE + "--chunked-prefill-size -1 --max-prefill-tokens 68000 --max-running-requests 1 "
        "--disable-radix-cache --disable-cuda-graph --enable-nsa-prefill-context-parallel "
        "--nsa-prefill-cp-mode in-seq-split --attn-cp-size 32 --deepep-mode normal "
        "--mem-fraction-static 0.73 --speculative-num-steps 1 --speculative-num-draft-tokens 2",
        ALL + "HCCL_BUFFSIZE=1200 TASK_QUEUE_ENABLE=2 DEEP_NORMAL_MODE_USE_INT8_QUANT=1 "
        f"{DISPATCH}0 SGLANG_USE_AG_AFTER_QLORA=1",
    ),
    ("deepseek-v3.2", "decode"): (
        GUIDE + "--dp-size 8 --ep 32 --enable-dp-attention --enable-dp-lm-head "
        "--cuda-graph-max-bs 4 --deepep-mode low_latency --mem-fraction-static 0.79 "
        "--speculative-num-steps 3 --speculative-num-draft-tokens 4",
        ALL + f"HCCL_BUFFSIZE=400 TASK_QUEUE_ENABLE=0 {DISPATCH}8 "
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER=1 SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1 "
        "SGLANG_ENABLE_SPEC_V2=1",
    ),
    ("deepseek-r1", "prefill"): (PAGE, "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"),
    ("deepseek-r1", "decode"): (
        PAGE + "--enable-deepep-moe --deepep-mode low_latency --ep-size 16",
        "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True HCCL_BUFFSIZE=200 "
        f"{DISPATCH}24 SGLANG_NPU_USE_MLAPO=1",
    ),
}
"""What the documents have for each role."""
PLACES = (
    *("--model-path", "--nnodes", "--node-rank", "--dist-init-addr", "--host", "--port"),
    *("--disaggregation-mode", "--disaggregation-transfer-backend"),
    *("--disaggregation-bootstrap-port", "HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "ASCEND_MF_STORE_URL",
)
"""Names, addresses and ports: each cluster has its own."""


def plan_of(name: str, soc: str = "A3", **other: object) -> LaunchPlan:
    return make_plan(Wish(**{"soc": SOCS[soc], **PLANS[name], **other}))


def said(words: list[str]) -> set[str]:
    """Flags with their values, in one spelling."""
    found: list[str] = []
    for word in words:
        if word.startswith("--"):
            found.append(word.replace("--ep", "--ep-size") if word == "--ep" else word)
        else:
            found[-1] += f" {word}"
    return {each for each in found if each.split()[0] not in PLACES}


@pytest.mark.parametrize("name", PLANS)
def test_a_recipe_of_the_documents_is_what_is_kept_byte_by_byte(name: str) -> None:
    files = files_of(plan_of(name))
    kept = {path.name: path.read_bytes() for path in (GOLDEN / name).iterdir()}
    assert files.keys() == kept.keys()
    for file, text in files.items():
        assert text.encode() == kept[file], file


@pytest.mark.parametrize("name", PLANS)
def test_each_difference_from_the_documents_is_explained(name: str) -> None:
    theirs, ours = set(), set()
    for node in plan_of(name).nodes:
        flags, variables = DOCUMENTED[name, node.role]
        mine = {f"{k}={v}" for k, v in node.variables.items() if k not in PLACES}
        assert mine == set(variables.split())
        given, wanted = said(list(node.words)), said(flags.split())
        theirs |= wanted - given
        ours |= given - wanted
    rows = [
        [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        for line in DOCS.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| {name} |")
    ]
    assert {row[1] for row in rows} - {""} == theirs
    assert {row[2] for row in rows} - {""} == ours
    assert all(row[3] for row in rows)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize(("name", "warned"), [("deepseek-v3.2", set()), ("deepseek-r1", {"19a"})])
def test_a_plan_keeps_the_rules(name: str, soc: str, warned: set[str]) -> None:
    wish = PLANS[name]
    times = 16 // SOCS[soc].devices
    nodes = {r: [f"{a}{n}" for a in own for n in range(times)] for r, own in wish["nodes"].items()}
    findings = [found for _, found in check_plan(plan_of(name, soc, nodes=nodes, interface="eth0"))]
    assert [found for found in findings if found.is_error] == []
    assert {found.rule for found in findings} == warned


def test_the_check_verb_takes_what_the_recipe_verb_writes(tmp_path, capsys) -> None:
    for node in plan_of("deepseek-v3.2").nodes:
        file = tmp_path / f"{node.name}.env"
        file.write_text(files_of(plan_of("deepseek-v3.2"))[file.name])
        assert main(["check", *node.words, "--soc", "A3", "--env", str(file)]) in (0, 2)
        assert "verdict  A3: 0 errors, 0 warnings" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "role"), DOCUMENTED)
def test_the_documents_own_lines_keep_the_rules(name: str, role: str, tmp_path, capsys) -> None:
    """As they stand there, in the older spelling too, with tp 32 where the guide leaves it open."""
    flags, variables = DOCUMENTED[name, role]
    (node,) = [n for n in plan_of(name).nodes if n.role == role and n.is_first]
    places = [f for flag in lines_of(node.words) if flag.split()[0] in PLACES for f in flag.split()]
    size = ["--tp-size", "32"] if name == "deepseek-v3.2" else []
    own = [f"{k}={v}" for k, v in node.variables.items() if k in PLACES]
    file = tmp_path / "node.env"
    file.write_text("\n".join([*variables.split(), *own]))
    line = [*places, *flags.split(), *size]
    assert main(["check", *line, "--soc", "A3", "--env", str(file)]) in (0, 2)
    out = capsys.readouterr().out
    assert "A3: 0 errors" in out
    if role == "decode":
        needed = {"deepseek-v3.2": "60 of the 400 MB", "deepseek-r1": "180 of the 200 MB"}[name]
        assert f"need {needed} of HCCL's buffer" in out


def test_a_plan_that_breaks_a_rule_is_not_made(capsys) -> None:
    words = ["--prefill", "192.0.2.1,192.0.2.2", "--decode", "192.0.2.3,192.0.2.4"]
    assert main(["recipe", "/m/DeepSeek-V3.2", "--soc", "A3", *words]) == 2
    assert "no interface between them is named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["/m"], "no chip is named"),
        (["org/m", "--soc", "A3", "--serve", "a"], "is no folder from / on"),
        (["/m", "--soc", "A3"], "addresses of the nodes with --serve"),
        (["/m", "--soc", "A3", "--prefill", "a"], "has other roles than --prefill"),
        (["/m/DeepSeek-V3.2", "--soc", "A3", "--prefill", "a", "--decode", "b,c"], "2 nodes each"),
        (["M", "--soc", "A3", "--serve", "a b;"], "is no address"),
        (["M", "--soc", "A3", "--serve", "a,a"], "names a twice"),
        (["M", "N", "--soc", "A3", "--serve", "a"], "takes one model"),
    ],
)
def test_a_wish_that_makes_no_plan_is_refused(words, says, capsys) -> None:
    assert main(["recipe", *words]) == 2
    assert says in capsys.readouterr().err


def test_another_model_is_served_over_all_devices(capsys) -> None:
    words = ["/models/m", "--soc=A2", "--serve", "192.0.2.1,192.0.2.2", "--interface", "eth0"]
    assert main(["recipe", *words]) == 0
    out = capsys.readouterr().out
    assert "--tp-size 16" in out and "--node-rank 1" in out and "router" not in out


def test_more_nodes_are_more_instances_of_a_role() -> None:
    nodes = {"prefill": [f"192.0.2.{n}" for n in range(1, 5)], "decode": ["192.0.2.8", "192.0.2.9"]}
    plan = plan_of("deepseek-v3.2", nodes=nodes)
    assert [node.name for node in plan.nodes if node.role == "prefill"] == [
        f"prefill-{instance}-{rank}" for instance in (0, 1) for rank in (0, 1)
    ]
    assert plan.router.count("--prefill") == 2
    stores = {node.variables["ASCEND_MF_STORE_URL"] for node in plan.nodes}
    assert stores == {"tcp://192.0.2.1:6670"}


@pytest.mark.parametrize("name", PLANS)
def test_scripts_start_what_the_plan_says(name: str, tmp_path: Path) -> None:
    """Each script is run with a python3 that writes down what it gets."""
    plan = plan_of(name)
    for file, text in files_of(plan).items():
        (tmp_path / file).write_text(text)
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nenv\nprintf "ARG %s\\n" "$@"\n')
    stand_in.chmod(0o755)
    for node in plan.nodes:
        done = subprocess.run(
            ["sh", str(tmp_path / f"{node.name}.sh")],
            env={"PATH": f"{stand_in.parent}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        lines = done.stdout.splitlines()
        got = tuple(line.removeprefix("ARG ") for line in lines if line.startswith("ARG "))
        assert got == node.command[1:]
        assert {f"{k}={v}" for k, v in node.variables.items()} <= set(lines)
        assert read_variables(str(tmp_path / f"{node.name}.env")) == node.variables


@pytest.mark.parametrize("soc", SOCS)
def test_containers_get_the_devices_of_the_chip_and_the_same_command(soc: str) -> None:
    count = SOCS[soc].devices
    nodes = {"serve": ["192.0.2.1"]}
    plan = make_plan(Wish("/models/m", SOCS[soc], nodes))
    files = files_of(plan)
    wanted = {f"/dev/davinci{n}" for n in range(count)}
    wanted |= {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}

    (line,) = (part for part in files["docker.sh"].split("\n\n") if "docker run" in part)
    words = shlex.split(line.replace("\\\n", " "), comments=True)
    devices = {after for word, after in zip(words, words[1:], strict=False) if word == "--device"}
    assert wanted | {"npu"} == devices
    assert tuple(words[words.index("serve") + 1 :]) == plan.nodes[0].words

    service = yaml.safe_load(files["compose.yaml"])["services"]["serve-0-0"]
    assert {pair.split(":")[0] for pair in service["devices"]} == wanted
    assert tuple(service["command"][1:]) == plan.nodes[0].words
    assert "/models/m:/models/m:ro" in service["volumes"]

    config, deployment = yaml.safe_load_all(files["kubernetes.yaml"])
    assert config["data"] == plan.nodes[0].variables
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["huawei.com/Ascend910"] == count
    assert tuple(container["args"][1:]) == plan.nodes[0].words
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize(("nodes", "is_set"), [("192.0.2.1,192.0.2.2", True), ("192.0.2.1", False)])
def test_several_machines_learn_that_they_need_a_secret(nodes, is_set, capsys) -> None:
    words = ("recipe", "/models/M", "--soc", "A3", "--serve", nodes, "--interface", "eth0")
    assert main(words) == 0
    assert ("BANYAN_DIST_SECRET, the same long random text" in capsys.readouterr().err) == is_set


def test_files_are_written_where_they_are_wished(tmp_path: Path, capsys) -> None:
    words = ["/models/m", "--soc", "A3", "--serve", "192.0.2.1", "--out", str(tmp_path / "plan")]
    assert main(["recipe", *words]) == 0
    assert (tmp_path / "plan" / "serve-0-0.sh").stat().st_mode & 0o111
    (tmp_path / "file").write_text("")
    assert main(["recipe", *words[:-1], str(tmp_path / "file")]) == 2


def test_every_word_of_a_plan_is_a_flag_of_the_tables() -> None:
    for name in PLANS:
        for node in plan_of(name).nodes:
            found = arguments_of_words(node.words, Environment())
            assert found["disaggregation-mode"] == node.role


def test_a_recipe_needs_a_plan_only_for_roles_it_has() -> None:
    with pytest.raises(ConfigError, match="--prefill and --decode"):
        make_plan(Wish("/models/DeepSeek-R1", SOCS["A3"], {"serve": ["a"]}))


def test_the_host_script_sets_what_the_doctor_wants_and_names_what_is_not_there(
    tmp_path: Path,
) -> None:
    found = {
        "proc/sys/vm/swappiness": ("60", "0"),
        "proc/sys/kernel/numa_balancing": ("1", "0"),
        "sys/kernel/debug/sched/migration_cost_ns": ("500000", "50000"),
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": ("powersave", "performance"),
        "sys/devices/system/cpu/cpu11/cpufreq/scaling_governor": ("powersave", "performance"),
    }
    for name, (before, _) in found.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(before)
    (tmp_path / "proc/sys/kernel/numa_balancing").unlink()
    done = subprocess.run(
        ["sh", "-euc", host_settings(str(tmp_path))], capture_output=True, text=True, check=True
    )
    del found["proc/sys/kernel/numa_balancing"]
    assert "numa_balancing is not here" in done.stdout
    assert {name: (tmp_path / name).read_text().strip() for name in found} == {
        name: after for name, (_, after) in found.items()
    }


def test_the_settings_of_a_host_reach_each_machine_of_a_plan_in_kubernetes() -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    files = files_of(plan_of("deepseek-r1"))
    (host,) = yaml.safe_load_all(files["host.yaml"])
    schemas.validate(host, schemas.latest_version(), strict=True)
    (container,) = host["spec"]["template"]["spec"]["containers"]
    assert host_settings("/host") in container["command"][-1]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"/host/proc", "/host/sys"}


def test_the_manifests_in_the_tree_are_those_that_the_recipe_writes() -> None:
    plan = make_plan(Wish(soc=SOCS["A3"], model="/models/NAME", nodes={"serve": ["NODE"]}))
    files = files_of(plan)
    assert (DEPLOY / "host.yaml").read_text() == files["host.yaml"]
    assert (DEPLOY / "serve.yaml").read_text() == files["kubernetes.yaml"]
