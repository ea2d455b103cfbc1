"""Rules 14 to 16: interfaces between nodes, the store of MemFabric, ports; and drafts."""

import re
from collections.abc import Iterator
from ipaddress import ip_address

from banyan.ascend.launch.facts import Launch
from banyan.ascend.launch.findings import Breach, breach

INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
STORE = "ASCEND_MF_STORE_URL"
_HTTP_PORT, _BOOTSTRAP_PORT = 30000, 8998
_STORE_FORM = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})")
_MTP = ("NEXTN", "DEEPSEEK_MTP")


def interfaces(launch: Launch) -> Iterator[Breach]:
    for name in INTERFACES:
        value = launch.variable(name)
        if launch.nodes == 1:
            if value:
                yield breach("14d", name=name)
            continue
        if not value:
            yield breach("14a", nodes=launch.nodes, name=name)
            continue
        here = launch.interfaces
        if here is None:
            continue
        if value not in here:
            yield breach("14b", name=name, value=value, known=", ".join(sorted(here)))
        elif launch.number("node-rank") == 0:
            address = _host(launch.text("dist-init-addr"))
            if _is_address(address) and address not in here[value]:
                owned = ", ".join(here[value]) or "none"
                yield breach("14c", name=name, value=value, addresses=owned, address=address)


def store(launch: Launch) -> Iterator[Breach]:
    if not launch.role:
        return
    if launch.text("disaggregation-transfer-backend") == "ascend":
        url = launch.variable(STORE)
        found = _STORE_FORM.fullmatch(url)
        if not url:
            yield breach("15a")
        elif found is None or not 0 < int(found.group(2)) < 65536:
            yield breach("15b", value=url)
        else:
            address = _host(launch.text("dist-init-addr"))
            if launch.role == "prefill" and address and address != found.group(1).strip("[]"):
                yield breach("15d", host=found.group(1), address=address)
        if launch.packages is not None and "memfabric_hybrid" not in launch.packages:
            yield breach("15e")
    yield from _ports(launch)


def _ports(launch: Launch) -> Iterator[Breach]:
    wanted = [("--port", launch.number("port", _HTTP_PORT))]
    if launch.role == "prefill":
        port = launch.number("disaggregation-bootstrap-port", _BOOTSTRAP_PORT)
        wanted.append(("--disaggregation-bootstrap-port", port))
    meeting = launch.text("dist-init-addr").rpartition(":")[2]
    if meeting.isdigit():
        wanted.append(("--dist-init-addr", int(meeting)))
    found = _STORE_FORM.fullmatch(launch.variable(STORE))
    is_here = launch.role == "prefill" and launch.number("node-rank") == 0
    if found is not None and is_here:
        wanted.append((STORE, int(found.group(2))))
    for at, (second, port) in enumerate(wanted):
        for first, taken in wanted[:at]:
            if port == taken:
                yield breach("15c", port=port, first=first, second=second)


def drafts(launch: Launch) -> Iterator[Breach]:
    algorithm = launch.text("speculative-algorithm").upper()
    plans_ahead = launch.is_set("SGLANG_ENABLE_OVERLAP_PLAN_STREAM")
    width = launch.number("speculative-eagle-topk", 1)
    if launch.is_set("SGLANG_ENABLE_SPEC_V2"):
        if width != 1:
            yield breach("16a", value=width)
        if not plans_ahead:
            yield breach("16b")
    elif plans_ahead:
        yield breach("16f")
    steps = launch.number("speculative-num-steps")
    tokens = launch.number("speculative-num-draft-tokens")
    is_chain = algorithm not in ("", "NGRAM") and width == 1
    if is_chain and steps and tokens and tokens != steps + 1:
        yield breach("16c", tokens=tokens, steps=steps, wanted=steps + 1)
    model = launch.model
    drafter = launch.text("speculative-draft-model-path")
    if algorithm in _MTP and not drafter and model is not None and not model.draft_layers:
        yield breach("16d", value=algorithm, model=model.name)
    if algorithm == "EAGLE3" and not drafter:
        yield breach("16e")


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


NETWORK_RULES = (interfaces, store, drafts)
