"""examples/kubernetes: objects that Kubernetes takes, which fit together, with commands that the library takes.

No cluster is needed: core objects are checked against Kubernetes' own schemas, the JobSet against one of ours.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.processes import start

from torchft_ckpt.__main__ import _parser
from torchft_ckpt.cli.run import _plan
from torchft_ckpt.network import parse_addresses

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "examples" / "kubernetes"
KUBERNETES = "1.37"
SCHEMA = json.loads(Path(__file__).with_name("jobset.schema.json").read_text())
Object = dict[str, Any]


def objects(folder: Path = FOLDER) -> dict[str, Object]:
    """Return all objects of the example by their kinds; there is one of each."""
    found = [each for path in sorted(folder.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    kinds = {each["kind"]: each for each in found}
    assert len(kinds) == len(found)
    return kinds


def check_jobset(jobset: Object) -> None:
    jsonschema.validate(jobset, SCHEMA)
    for job in jobset["spec"]["replicatedJobs"]:
        template = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(template, KUBERNETES, strict=True)


def pod_of(kind: str) -> Object:
    spec = objects()[kind]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if kind == "JobSet" else spec
    return job["template"]


def container_of(kind: str) -> Object:
    (container,) = pod_of(kind)["spec"]["containers"]
    return container


@pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy", "Service"])
def test_core_objects_are_what_kubernetes_takes(kind: str) -> None:
    kubernetes_validate.validate(objects()[kind], KUBERNETES, strict=True)


def test_the_jobset_is_what_its_controller_takes() -> None:
    check_jobset(objects()["JobSet"])


def test_a_misspelt_field_is_found_in_the_jobset_and_in_its_pods() -> None:
    for path in (
        ["spec"],
        ["spec", "replicatedJobs", 0],
        ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec"],
    ):
        jobset = copy.deepcopy(objects()["JobSet"])
        place = jobset
        for step in path:
            place = place[step]
        place["replica"] = 4
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError), match="replica"):
            check_jobset(jobset)


def test_the_objects_find_each_other() -> None:
    kinds = objects()
    lighthouse, group = container_of("Deployment"), container_of("JobSet")
    service = kinds["Service"]
    (port,) = service["spec"]["ports"]
    (container_port,) = lighthouse["ports"]
    labels = pod_of("Deployment")["metadata"]["labels"]

    assert service["spec"]["selector"] == labels == kinds["Deployment"]["spec"]["selector"]["matchLabels"]
    assert port["targetPort"] == container_port["name"]
    assert f"--bind=[::]:{container_port['containerPort']}" in lighthouse["args"]
    assert f"--lighthouse={service['metadata']['name']}:{port['port']}" in group["args"]
    assert f"--hostname={service['metadata']['name']}" in lighthouse["args"]
    policy = kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert policy.items() <= labels.items()
    assert policy.items() <= pod_of("JobSet")["metadata"]["labels"].items()
    assert [e for e in lighthouse["env"] if e["name"] == "TORCHFT_CKPT_TOKEN"] == [
        e for e in group["env"] if e["name"] == "TORCHFT_CKPT_TOKEN"
    ]
    assert lighthouse["image"] == group["image"]


def test_two_lighthouses_take_the_place_of_the_one_and_groups_find_both() -> None:
    several, one = objects(FOLDER / "several"), objects()
    for each in several.values():
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    service, spec = several["Service"], several["StatefulSet"]["spec"]
    pod = spec["template"]
    (container,), (alone,) = pod["spec"]["containers"], pod_of("Deployment")["spec"]["containers"]
    assert several["NetworkPolicy"] == one["NetworkPolicy"]
    assert pod["metadata"]["labels"] == service["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert pod["metadata"]["labels"] == pod_of("Deployment")["metadata"]["labels"]
    assert several["PodDisruptionBudget"]["spec"]["selector"] == spec["selector"]
    same = ("image", "ports", "readinessProbe", "livenessProbe", "resources", "securityContext")
    assert {name: container[name] for name in same} == {name: alone[name] for name in same}

    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    addresses = ",".join(f"{spec['serviceName']}-{number}.{name}:{port}" for number in range(spec["replicas"]))
    for text in (
        (FOLDER / "several" / "lighthouses.yaml").read_text(),
        (REPO / "docs/guides/kubernetes.md").read_text(),
    ):
        assert f"--lighthouse={addresses}" in text
    values = {"POD": f"{name}-1", "NAMESPACE": "default"}
    assert values.keys() <= {each["name"] for each in container["env"]}
    arguments = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], argument) for argument in container["args"]]
    options = _parser().parse_args(arguments)
    assert f"{options.hostname}:{port}" in addresses.split(",")
    places = parse_addresses(options.etcd, what="etcd address")
    assert (len(places), options.etcd_prefix) == (3, "default/torchft")
    assert [a for a in alone["args"] if not a.startswith("--hostname")] == [a for a in arguments if a in alone["args"]]


def test_a_group_is_started_as_its_jobset_numbers_it() -> None:
    container = container_of("JobSet")
    (job,) = objects()["JobSet"]["spec"]["replicatedJobs"]
    names = {each["name"] for each in container["env"]}
    values = {"GROUP": "2", "NUM_GROUPS": str(job["replicas"]), "JOB": "a-uid"}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) == set(values) <= names

    options = _parser().parse_args([re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], arg) for arg in container["args"]])

    plan = _plan(options)
    assert (list(plan.groups), plan.num_all_groups) == ([2], job["replicas"])
    assert plan.ranks_per_group == container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--min-replicas={plan.min_replicas}" in container_of("Deployment")["args"]
    assert f"--min-replica-size={plan.min_replicas}" in container["args"]
    assert plan.left_status != 0, "a Job whose pod ends with 0 is complete, and makes no other pod"


@pytest.mark.processes
def test_the_probes_are_answered_without_the_token() -> None:
    container = container_of("Deployment")
    arguments = [re.sub(r"^--bind=.*", "--bind=127.0.0.1:0", argument) for argument in container["args"]]
    lighthouse = start(
        [sys.executable, "-m", "torchft_ckpt", *arguments, "--hostname=127.0.0.1"],
        env=os.environ | {"TORCHFT_CKPT_TOKEN": "0123456789" * 4},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = lighthouse.stdout.readline().split()[-1]
        for probe in ("readinessProbe", "livenessProbe"):
            with urllib.request.urlopen(address + container[probe]["httpGet"]["path"], timeout=30) as answer:
                assert answer.status == 200
    finally:
        lighthouse.terminate()
        assert lighthouse.wait(120) == 0
        lighthouse.stdout.close()


def test_the_image_is_made_of_files_that_there_are() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copied = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]

    assert [source for source in copied if not (REPO / source).exists()] == []
    assert Path(container_of("JobSet")["args"][-2]).name in {Path(source).name for source in copied}
