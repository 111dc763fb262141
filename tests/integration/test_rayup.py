"""`outrider deploy` for real: `ray up` over SSH to hosts of our own, one deployment that is used,
loses a host and takes another, and at last is down without a trace."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hosts import Host, Hosts, skip_reason
from rayup_tools import Operator
from waits import wait_until

from outrider import LLM, SamplingParams
from outrider.client import Client

pytestmark = [pytest.mark.ray, pytest.mark.model]

PROMPTS = ["The capital of France is", "Once upon a time there was a"]
NUM_TOKENS = 24
REPAIR_S = 180.0


@dataclass
class Deployed:
    """Hosts with a server on them, and whoever deployed it."""

    hosts: Hosts
    operator: Operator
    head: Host
    target: Host
    draft: Host

    def over_grpc(self) -> list[str]:
        with Client(f"{self.head.ip}:50051", api_key=self.operator.key) as client:
            params = {"max_tokens": NUM_TOKENS, "temperature": 0, "timeout_s": 120}
            return [client.generate(prompt, **params).text for prompt in PROMPTS]

    def over_http(self) -> list[str]:
        body = {"model": "smollm2-135m-instruct", "max_tokens": NUM_TOKENS, "temperature": 0}
        key = {"Authorization": f"Bearer {self.operator.key}"}
        found = []
        for prompt in PROMPTS:
            request = urllib.request.Request(
                f"http://{self.head.ip}:8000/v1/completions",
                json.dumps(body | {"prompt": prompt}).encode(),
                {"Content-Type": "application/json"} | key,
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                found.append(json.load(answer)["choices"][0]["text"])
        return found

    def ranks(self) -> list[str]:
        """Where ranks run."""
        found = self.operator.status()["processes"]
        return sorted(
            each["ip"] for each in found if (each["kind"], each["state"]) == ("RankActor", "alive")
        )


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What `LLM` generates here, without any cluster."""
    with LLM(deterministic=True) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0))
        return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    reason = skip_reason()
    if reason is not None:
        pytest.skip(reason)
    with Hosts() as hosts:
        head, target, draft = (hosts.add(name) for name in ("head", "target", "draft"))
        operator = Operator(tmp_path_factory.mktemp("rayup"), hosts)
        operator.edit(head, [target], [draft])
        operator.serve({"deterministic": True, "server": {"drain_s": 2.0}})
        up = operator.deploy("up")
        assert f"HTTP  http://{head.ip}:8000\ngRPC  {head.ip}:50051\n" in up
        try:
            yield Deployed(hosts, operator, head, target, draft)
        finally:
            operator.write_transcript()


def test_both_protocols_answer_with_the_text_of_llm(deployed: Deployed, texts: list[str]) -> None:
    assert deployed.over_grpc() == texts
    assert deployed.over_http() == texts


def test_target_and_draft_are_on_the_hosts_of_their_roles(deployed: Deployed) -> None:
    found = deployed.operator.status()
    assert found["server"]["state"] == "serving"
    roles = {node["ip"]: node["role"] for node in found["nodes"]}
    assert roles == {
        deployed.head.ip: "",
        deployed.target.ip: "target",
        deployed.draft.ip: "draft",
    }
    assert deployed.ranks() == sorted((deployed.target.ip, deployed.draft.ip))


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_replaced_by_one_that_joins(
    deployed: Deployed, texts: list[str]
) -> None:
    """The server goes on; the draft moves to the host that takes the place of the lost one."""
    hosts, operator = deployed.hosts, deployed.operator
    before = operator.status()["server"]
    lost = deployed.draft
    hosts.cut(lost)
    operator.note(f"{lost.ip} is cut off")
    assert deployed.over_grpc() == texts
    deployed.draft = hosts.add("spare")
    operator.edit(deployed.head, [deployed.target], [deployed.draft])
    operator.note(f"{deployed.draft.ip} takes its place in cluster.yaml")
    operator.deploy("up")
    assert operator.status()["server"] == before
    places = sorted((deployed.target.ip, deployed.draft.ip))
    wait_until(lambda: deployed.ranks() == places, REPAIR_S, lambda: operator.said[-1])
    operator.deploy("status")
    assert deployed.over_http() == texts
    hosts.remove(lost)


@pytest.mark.slow
def test_a_server_that_is_killed_on_the_head_is_started_anew(
    deployed: Deployed, texts: list[str]
) -> None:
    operator = deployed.operator
    before = operator.status()
    deployed.head.run(f"kill -9 {before['server']['pid']}")
    operator.note("the server was killed on the head")

    def is_back() -> bool:
        server = operator.status()["server"]
        return server is not None and (server["restarts"] > 0, server["state"]) == (True, "serving")

    wait_until(is_back, REPAIR_S, lambda: operator.said[-1])
    assert operator.status()["keeper"] == before["keeper"]
    assert deployed.over_grpc() == texts


def test_down_leaves_nothing_on_any_host_nor_here(deployed: Deployed) -> None:
    operator = deployed.operator
    operator.deploy("down")
    for host in (deployed.head, deployed.target, deployed.draft):
        assert host.processes() == {}, host.name
        left = host.run(
            "cd; ls -d .ray/* ray_* /tmp/ray /tmp/ray_ssh_* /dev/shm/* 2>/dev/null || true"
        )
        assert left == "", host.name
    assert list((operator.folder / "ray").glob("cluster-*")) == []
    found = operator.status()
    assert (found["server"], found["nodes"], found["processes"]) == (None, [], [])
