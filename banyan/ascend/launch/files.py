"""Files that start a plan by hand, by Docker and Compose, and by Kubernetes."""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from banyan.ascend.launch.facts import Soc
from banyan.ascend.launch.plan import LaunchPlan, PlannedNode, lines_of

IMAGE = "banyan-npu"
SHARED_MEMORY_GB = 16
MANAGEMENT = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
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


def devices(soc: Soc) -> tuple[str, ...]:
    """Every device file of one machine with this chip."""
    return (*(f"/dev/davinci{number}" for number in range(soc.devices)), *MANAGEMENT)


def mounts(model: str) -> tuple[str, ...]:
    """HOST:INSIDE of the driver's folders and of the weights, all read-only."""
    return tuple(f"{path}:{path}:ro" for path in (*DRIVER, model))


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
    found: dict[str, str] = {}
    for node in plan.nodes:
        found[f"{node.name}.env"] = "".join(f"{k}={v}\n" for k, v in node.variables.items())
        found[f"{node.name}.sh"] = _script(node)
    if plan.router:
        found["router.sh"] = f"#!/bin/sh\nexec {_script_line(plan.router)}\n"
    found["docker.sh"] = _by_hand(plan)
    found["compose.yaml"] = _compose(plan)
    found["kubernetes.yaml"] = _kubernetes(plan)
    return found


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
    places = list(enumerate(m.split(":")[0] for m in mounts(plan.wish.model)))
    container: dict[str, object] = {
        "name": "banyan",
        "image": IMAGE,
        "args": list(_serve_words(node)),
        "envFrom": [{"configMapRef": {"name": node.name}}],
        "securityContext": {"privileged": True},
        "resources": {"limits": {RESOURCE: plan.wish.soc.devices}},
        "volumeMounts": [
            *({"name": f"host-{at}", "mountPath": path} for at, path in places),
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
            *({"name": f"host-{at}", "hostPath": {"path": path}} for at, path in places),
            {"name": "shm", "emptyDir": shared},
        ],
    }
    yield _deployment(node.name, pod)


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
