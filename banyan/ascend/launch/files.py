"""Files that start a plan by hand, by Docker and Compose, and by Kubernetes.

The settings of each host come first: `host.sh` sets them by hand, `host.yaml` by Kubernetes.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from banyan.ascend.launch.facts import Soc
from banyan.ascend.launch.machine import (
    GOVERNOR,
    MANAGEMENT,
    MIGRATION_NS,
    SHARED_MEMORY_GB,
    WANTED_SYSCTLS,
)
from banyan.ascend.launch.plan import LaunchPlan, PlannedNode, lines_of

IMAGE = "banyan-npu"
DRIVER = (
    "/usr/local/sbin",
    "/usr/local/Ascend/driver",
    "/usr/local/Ascend/firmware",
    "/etc/ascend_install.info",
    "/var/queue_schedule",
)
"""Of the host, at the same place inside."""
RESOURCE = "huawei.com/Ascend910"
"""What the vendor's device plugin calls one device in Kubernetes."""
CACHE, CACHE_INSIDE = "/var/cache/banyan", "/var/lib/banyan/.cache"
"""Folder of the host for compiled kernels and downloads, and its place in the image."""
SYSCTL_FILE = "90-banyan.conf"


def devices(soc: Soc) -> tuple[str, ...]:
    """Every device file of one machine with this chip."""
    return (*(f"/dev/davinci{number}" for number in range(soc.devices)), *MANAGEMENT)


def mounts(model: str) -> tuple[str, ...]:
    """HOST:INSIDE of the driver's folders and of the weights, read-only, and of the cache."""
    return (*(f"{path}:{path}:ro" for path in (*DRIVER, model)), f"{CACHE}:{CACHE_INSIDE}")


def docker_run(soc: Soc, model: str, name: str, command: Sequence[str]) -> str:
    """The command that starts one container, with its file of variables."""
    lines = [
        f"docker run --rm --name {name} --privileged --network host --ipc host",
        f"--shm-size {SHARED_MEMORY_GB}g --ulimit memlock=-1 --env-file {name}.env",
        *(f"--device {path}" for path in devices(soc)),
        *(f"--volume {shlex.quote(mount)}" for mount in mounts(model)),
        IMAGE,
        *command,
    ]
    return " \\\n  ".join(lines)


_LABEL = "banyan/node"


def files_of(plan: LaunchPlan) -> dict[str, str]:
    """File name -> text, in the order in which they are read best."""
    found = {SYSCTL_FILE: _sysctls(), "host.sh": _host_script(), "host.yaml": _host_manifest()}
    for node in plan.nodes:
        found[f"{node.name}.env"] = "".join(f"{k}={v}\n" for k, v in node.variables.items())
        found[f"{node.name}.sh"] = _script(node)
    if plan.router:
        found["router.sh"] = f"#!/bin/sh\nexec {_script_line(plan.router)}\n"
    found["docker.sh"] = _by_hand(plan)
    found["compose.yaml"] = _compose(plan)
    found["kubernetes.yaml"] = _kubernetes(plan)
    return found


def _sysctls() -> str:
    """A file for /etc/sysctl.d."""
    return "".join(f"{name} = {value}\n" for name, value in WANTED_SYSCTLS.items())


def host_settings(root: str = "") -> str:
    """Shell lines that set a running machine; `root` is where the host's /proc and /sys are.

    Kernels from 5.13 on keep the migration cost in debugfs. What a machine does not have is
    named and left out.
    """
    lines = [
        "put() {",
        '  if [ -w "$2" ]; then echo "$1" > "$2" && echo "$2 = $1"; else echo "$2 is not here"; fi',
        "}",
        *(
            f"put {value} {root}/proc/sys/{name.replace('.', '/')}"
            for name, value in WANTED_SYSCTLS.items()
        ),
        f"cost={root}/proc/sys/kernel/sched_migration_cost_ns",
        f'[ -e "$cost" ] || cost={root}/sys/kernel/debug/sched/migration_cost_ns',
        f'put {MIGRATION_NS} "$cost"',
        f"for file in {root}/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor; do",
        f'  put {GOVERNOR} "$file"',
        "done",
    ]
    return "\n".join(lines) + "\n"


def _host_script() -> str:
    return (
        "#!/bin/sh\n# As root on each node, once and after each change of the kernel.\nset -eu\n"
        f'install -m 644 "$(dirname "$0")/{SYSCTL_FILE}" /etc/sysctl.d/{SYSCTL_FILE}\n'
        f"mkdir -p {CACHE}\n{host_settings()}"
    )


def _host_manifest() -> str:
    """The settings of host.sh for each machine that has the label of a plan."""
    host = "/host"
    container: dict[str, object] = {
        "name": "settings",
        "image": IMAGE,
        "command": ["/bin/sh", "-c", f"{host_settings(host)}exec sleep infinity"],
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": name, "mountPath": f"{host}/{name}"} for name in ("proc", "sys")],
    }
    exists = {"key": _LABEL, "operator": "Exists"}
    pod = {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [exists]}]
                }
            }
        },
        "containers": [container],
        "volumes": [{"name": name, "hostPath": {"path": f"/{name}"}} for name in ("proc", "sys")],
    }
    labels = {"app": "banyan-host"}
    return _yaml(
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "banyan-host"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        }
    )


def _script(node: PlannedNode) -> str:
    return (
        f"#!/bin/sh\n# On {node.address}, next to {node.name}.env.\n"
        f'set -a\n. "$(dirname "$0")/{node.name}.env"\nset +a\nexec {_script_line(node.command)}\n'
    )


def _script_line(words: tuple[str, ...]) -> str:
    return " \\\n  ".join(lines_of(words))


def _by_hand(plan: LaunchPlan) -> str:
    text = "#!/bin/sh\n# The line for each node, to be run there next to its .env file.\n"
    for node in plan.nodes:
        command = lines_of(_serve_words(node))
        line = docker_run(plan.wish.soc, plan.wish.model, node.name, command)
        text += f"\n# {node.address}\n{line}\n"
    return text


def _serve_words(node: PlannedNode) -> tuple[str, ...]:
    """What the image's own entry point gets."""
    return ("serve", *node.words)


def _compose(plan: LaunchPlan) -> str:
    services: dict[str, object] = {}
    for node in plan.nodes:
        services[node.name] = {
            "profiles": [node.name],
            "image": IMAGE,
            "command": list(_serve_words(node)),
            "env_file": [f"{node.name}.env"],
            "network_mode": "host",
            "ipc": "host",
            "privileged": True,
            "shm_size": f"{SHARED_MEMORY_GB}g",
            "ulimits": {"memlock": -1},
            "devices": [f"{path}:{path}" for path in devices(plan.wish.soc)],
            "volumes": list(mounts(plan.wish.model)),
            "restart": "unless-stopped",
        }
    if plan.router:
        services["router"] = {
            "profiles": ["router"],
            "image": IMAGE,
            "entrypoint": list(plan.router),
            "network_mode": "host",
            "restart": "unless-stopped",
        }
    head = "# On each node: docker compose --profile NAME up, with the name of the node below.\n"
    return head + _yaml({"services": services})


def _kubernetes(plan: LaunchPlan) -> str:
    head = (
        "# Label each machine first: kubectl label node MACHINE banyan/node=NAME\n"
        "# The vendor's device plugin gives out the devices; the network is the host's.\n"
    )
    parts = [_yaml(each) for node in plan.nodes for each in _manifests(node, plan)]
    if plan.router:
        parts.append(_yaml(_router_manifest(plan)))
    return head + "---\n".join(parts)


def _manifests(node: PlannedNode, plan: LaunchPlan) -> Iterator[dict[str, object]]:
    yield {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": node.name},
        "data": dict(node.variables),
    }
    places = list(enumerate(tuple(m.split(":")[:2]) for m in mounts(plan.wish.model)))
    container: dict[str, object] = {
        "name": "banyan",
        "image": IMAGE,
        "args": list(_serve_words(node)),
        "envFrom": [{"configMapRef": {"name": node.name}}],
        "securityContext": {"privileged": True},
        "resources": {"limits": {RESOURCE: plan.wish.soc.devices}},
        "volumeMounts": [
            *({"name": f"host-{at}", "mountPath": inside} for at, (_, inside) in places),
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if node.is_first:
        container |= {
            "ports": [{"containerPort": node.port}],
            "readinessProbe": {"httpGet": {"path": "/readyz", "port": node.port}},
        }
    shared = {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GB}Gi"}
    pod = {
        "hostNetwork": True,
        "nodeSelector": {_LABEL: node.name},
        "containers": [container],
        "volumes": [
            *({"name": f"host-{at}", "hostPath": _host_path(path)} for at, (path, _) in places),
            {"name": "shm", "emptyDir": shared},
        ],
    }
    yield _deployment(node.name, pod)


def _host_path(path: str) -> dict[str, object]:
    return {"path": path, "type": "DirectoryOrCreate"} if path == CACHE else {"path": path}


def _router_manifest(plan: LaunchPlan) -> dict[str, object]:
    container = {"name": "router", "image": IMAGE, "command": list(plan.router)}
    first = plan.nodes[0].name
    pod = {"hostNetwork": True, "nodeSelector": {_LABEL: first}, "containers": [container]}
    return _deployment("router", pod)


def _deployment(name: str, pod: Mapping[str, object]) -> dict[str, object]:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _yaml(part: dict[str, object]) -> str:
    import yaml

    class Plain(yaml.SafeDumper):
        """Without anchors: each node's part can be read alone."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump(part, Dumper=Plain, sort_keys=False, width=10_000)
