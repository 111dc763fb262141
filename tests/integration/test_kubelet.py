"""Pods of our own behave as kubelet's: images, probes, restarts, hooks, grace; nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubelet import Pod
from pod_containers import Node
from pods import ROOT, Machine, skip_reason
from waits import wait_until

IMAGE = "registry.example/here"
LIMIT_S = 60.0
# Has a pod, says its pid and the folder, and waits to be killed.
HOLDER = """
import sys, time
from pod_image import IMAGE_ENV
from pods import ROOT, Machine, Running
with Machine() as machine:
    sandbox = machine.sandbox("held")
    running = Running(sandbox, "held", ["sleep", "60"], IMAGE_ENV, [], ROOT)
    print(running.pid, sandbox.pid, machine.folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    reason = skip_reason()
    if reason is not None:
        pytest.skip(reason)
    items = {
        ("ConfigMap", "texts"): {"kind": "ConfigMap", "data": {"greeting": "hello"}},
        ("Secret", "keys"): {"kind": "Secret", "data": {"key": "c2VzYW1l"}},
    }
    with Machine() as machine:
        made = Node(machine, lambda kind, name: items[kind, name], {IMAGE: ROOT}, None, 0.02)
        yield made
        made.pool.shutdown(cancel_futures=True)


@pytest.fixture
def start(node: Node, request: pytest.FixtureRequest) -> Iterator[Callable[..., Pod]]:
    made: list[Pod] = []

    def start(script: str, grace_s: int = 30, **options: Any) -> Pod:
        container = {"name": "it", "image": IMAGE, "command": ["bash", "-c", script], **options}
        spec = {
            "terminationGracePeriodSeconds": grace_s,
            "containers": [container],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "texts", "configMap": {"name": "texts"}},
            ],
        }
        made.append(Pod(node, f"pod-{time.monotonic_ns()}", "llm", {"metadata": {}, "spec": spec}))
        return made[-1]

    yield start
    for each in made:
        if not each.is_gone:
            each.lose()


def until(pod: Pod, condition: Callable[[], bool]) -> None:
    def is_so() -> bool:
        pod.tick()
        return condition()

    wait_until(is_so, LIMIT_S, lambda: f"{pod.state()}\n{pod.log()}")


def test_environment_and_volumes_are_those_of_the_spec(start: Callable[..., Pod]) -> None:
    pod = start(
        "echo $KEY $(cat /etc/texts/greeting) $MY_NAME $0; touch /tmp/x /etc/texts/x; sleep 60",
        env=[
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
            {"name": "MY_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        args=["$(KEY)!"],
        volumeMounts=[
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "texts", "mountPath": "/etc/texts"},
        ],
    )
    until(pod, lambda: "Read-only" in pod.log())
    assert f"sesame hello {pod.name} sesame!" in pod.log()
    assert "/tmp/x" not in pod.log()


def test_an_image_that_is_not_there_is_waited_for(node: Node, start: Callable[..., Pod]) -> None:
    pod = start("sleep 60", image="registry.example/later")
    until(pod, lambda: pod.containers[0].reason == "ImagePullBackOff")
    assert not pod.is_ready
    assert isinstance(node.images, dict)
    node.images["registry.example/later"] = ROOT
    until(pod, lambda: pod.is_ready)


def test_a_container_that_ends_is_started_again_later_and_later(start: Callable[..., Pod]) -> None:
    pod = start("date +%s%N; exit 3")
    until(pod, lambda: pod.containers[0].num_restarts >= 4)
    times = [int(each) for each in pod.log().split() if each.isdigit()]
    gaps_s = [(after - before) / 1e9 for before, after in zip(times, times[1:], strict=False)]
    assert gaps_s[1] > 0.2 and gaps_s[2] > 0.4  # 10 s and 20 s at this pace
    assert set(pod.containers[0].exit_codes) == {3}


def test_probes_decide_who_is_ready_and_who_is_restarted(start: Callable[..., Pod]) -> None:
    volume = [{"name": "tmp", "mountPath": "/tmp"}]
    check = {"exec": {"command": ["test", "-e", "/tmp/well"]}, "timeoutSeconds": 30}
    ready = {**check, "failureThreshold": 1}
    live = {**check, "initialDelaySeconds": 500, "terminationGracePeriodSeconds": 1}
    pod = start(
        "sleep 1; touch /tmp/well; sleep 60",
        volumeMounts=volume,
        readinessProbe=ready,
        livenessProbe=live,
    )
    until(pod, lambda: pod.containers[0].running is not None)
    assert not pod.is_ready
    until(pod, lambda: pod.is_ready)
    running = pod.containers[0].running
    assert running is not None and running.execute(["rm", "/tmp/well"], LIMIT_S)[0] == 0
    until(pod, lambda: not pod.is_ready)
    until(pod, lambda: pod.containers[0].num_restarts == 1)
    until(pod, lambda: pod.is_ready)


def test_a_deleted_pod_has_its_hook_then_a_signal(start: Callable[..., Pod]) -> None:
    hook = {"preStop": {"exec": {"command": ["touch", "/tmp/hook"]}}}
    pod = start(
        'trap "ls /tmp; echo told; exit 0" TERM; while :; do sleep 0.1; done',
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
        lifecycle=hook,
    )
    until(pod, lambda: pod.is_ready)
    pod.delete()
    assert not pod.is_ready and pod.serves
    until(pod, lambda: pod.is_gone)
    assert pod.log().split()[-2:] == ["hook", "told"]


def test_one_that_does_not_end_is_killed_after_its_grace(start: Callable[..., Pod]) -> None:
    pod = start('trap "" TERM; while :; do sleep 0.1; done', grace_s=1)
    until(pod, lambda: pod.is_ready)
    pod.delete()
    until(pod, lambda: pod.is_gone)
    # Of the shell, or of the process above it, which may be killed while it waits.
    assert pod.containers[0].exit_codes in ([-9], [137], [1])


def test_nothing_stays_of_pods_whose_tests_were_killed(node: Node) -> None:
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    *pids, folder = holder.stdout.readline().split()
    holder.send_signal(signal.SIGKILL)
    holder.wait(LIMIT_S)
    holder.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), LIMIT_S)
    assert Path(folder).exists()
    with Machine() as machine:
        assert not Path(folder).exists()
        assert machine.folder.exists()
    assert not machine.folder.exists()
