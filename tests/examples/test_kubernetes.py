# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes manifests are valid, and what they say of each other is so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from reshard_build.bases import default_release
from reshard_build.project import Project

from tests.examples.checks import ROLES, check_kv_transfer
from tests.examples.manifests import (
    DIRECTORY,
    Manifest,
    container_of,
    env_of,
    find,
    pod_of,
    ports_of,
    read_kustomization,
    read_manifests,
)
from tests.examples.parsers import parse_vllm_router, parse_vllm_serve
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import read_settings

ROOT = DIRECTORY.parents[1]
ENGINES = ("prefill", "decode")
DEPLOYMENTS = (*ENGINES, "router")
# The first one whose preStop can sleep without a shell in the image, and the newest known here.
KUBERNETES_VERSIONS = ("1.30", "1.37")
LIMIT_S = 60.0


def _id(manifest: Manifest) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("manifest", read_manifests(), ids=_id)
def test_manifests_are_valid(manifest: Manifest, version: str) -> None:
    """Every object has the fields of its schema and no others."""
    kubernetes_validate.validate(manifest, version, strict=True)


def test_validation_notices_a_misspelt_field() -> None:
    """What passes does not pass because nothing is looked at."""
    manifest = find("Deployment", "prefill")
    container_of(manifest)["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSIONS[0], strict=True)


def test_all_manifests_are_applied() -> None:
    """No file is forgotten, and everything lies in the one namespace."""
    files = {path.name for path in DIRECTORY.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(read_kustomization()["resources"]) == files
    namespace = read_kustomization()["namespace"]
    for manifest in read_manifests():
        metadata = manifest["metadata"]
        place = metadata["name"] if manifest["kind"] == "Namespace" else metadata["namespace"]
        assert place == namespace


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_kustomization(tmp_path: Path) -> None:
    """What kubectl would apply is what is written, with images of a registry."""
    built = subprocess.run(
        ["kubectl", "kustomize", str(DIRECTORY)],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert built.returncode == 0, built.stderr
    objects = list(yaml.safe_load_all(built.stdout))
    assert sorted(map(_id, objects)) == sorted(map(_id, read_manifests()))
    images = {each["name"]: each for each in read_kustomization()["images"]}
    for name in DEPLOYMENTS:
        (deployed,) = (each for each in objects if _id(each) == f"Deployment-{name}")
        image = images[container_of(find("Deployment", name))["image"]]
        assert container_of(deployed)["image"] == f"{image['newName']}:{image['newTag']}"


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_labels_lead_to_the_pods(name: str) -> None:
    """Deployment and Service select the pods of their role, and of no other."""
    labels = [pod_of(find("Deployment", each))["metadata"]["labels"] for each in DEPLOYMENTS]
    own = labels[DEPLOYMENTS.index(name)]
    selectors = [
        find("Deployment", name)["spec"]["selector"]["matchLabels"],
        find("Service", name)["spec"]["selector"],
    ]
    for selector in selectors:
        assert [each for each in labels if selector.items() <= each.items()] == [own]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_ports_have_the_names_by_which_they_are_called(name: str) -> None:
    """Services and probes name ports that the container has, and it listens on them."""
    container = container_of(find("Deployment", name))
    ports = ports_of(container)
    assert {port["targetPort"] for port in find("Service", name)["spec"]["ports"]} == set(ports)
    probes = [container[probe] for probe in container if probe.endswith("Probe")]
    assert {probe["httpGet"]["port"] for probe in probes} == {"http"}
    assert f"--port={ports['http']}" in container["args"]


@pytest.mark.parametrize("name", ENGINES)
def test_headless_services_call_ports_by_their_numbers(name: str) -> None:
    """Nothing translates ports between a headless Service and a pod: both have the same."""
    service = find("Service", name)
    assert service["spec"]["clusterIP"] == "None"
    ports = ports_of(container_of(find("Deployment", name)))
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports


@pytest.mark.parametrize("name", ENGINES)
def test_engines_start_with_what_vllm_knows(name: str) -> None:
    """All options are vLLM's, and the engine has a GPU for each of its ranks."""
    container = container_of(find("Deployment", name))
    args = parse_vllm_serve(container["args"])
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks
    check_kv_transfer(args.kv_transfer_config, name)


def test_layouts_differ() -> None:
    """The example shows what this fork is for."""
    layouts = []
    for name in ENGINES:
        args = parse_vllm_serve(container_of(find("Deployment", name))["args"])
        layouts.append((args.tensor_parallel_size, args.pipeline_parallel_size))
    assert layouts == [(1, 2), (2, 1)]


def test_both_engines_serve_the_same_model() -> None:
    """Model and what lies beside layout and role are equal, because KV caches have to be."""
    sizes = ("--tensor-parallel-size=", "--pipeline-parallel-size=")
    prefill, decode = (
        [
            arg.replace(ROLES[name], "ROLE")
            for arg in container_of(find("Deployment", name))["args"]
            if not arg.startswith(sizes)
        ]
        for name in ENGINES
    )
    assert prefill == decode


@pytest.mark.parametrize("name", ENGINES)
def test_the_side_channel_is_where_others_are_told(name: str) -> None:
    """Its address is the pod's own, and its port the one that the pod declares."""
    container = container_of(find("Deployment", name))
    env = env_of(container)
    host = env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert host == "status.podIP"
    port = int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"])
    assert ports_of(container)["side-channel"] == port


@pytest.mark.parametrize("name", ENGINES)
def test_secrets_are_referred_to_only(name: str) -> None:
    """No token stands in a manifest."""
    token = env_of(container_of(find("Deployment", name)))["HF_TOKEN"]
    assert "value" not in token
    assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert not [each for each in read_manifests() if each["kind"] == "Secret"]


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_given_the_key_in_a_way_that_they_take(name: str) -> None:
    """It comes from the Secret that the README makes, where it is looked for, and not to all."""
    deployment = find("Deployment", name)
    container, pod = container_of(deployment), pod_of(deployment)["spec"]
    config = parse_vllm_serve(container["args"]).kv_transfer_config
    file = Path(read_settings(config).side_channel_key_file or "")
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    mount = mounts[str(file.parent)]
    assert mount["readOnly"] is True
    (volume,) = (each for each in pod["volumes"] if each["name"] == mount["name"])
    secret = volume["secret"]
    # Kubernetes lets the pod's group read as well, which is the engine's.
    assert secret["defaultMode"] & 0o007 == 0
    assert secret["defaultMode"] & 0o040
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    command = (
        f"create secret generic {secret['secretName']} --from-file={file.name}=side-channel.key"
    )
    assert command in (DIRECTORY / "README.md").read_text()


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_given_the_time_to_end(name: str) -> None:
    """The pod may take as long as preStop and the engine's own time together, and some more."""
    deployment = find("Deployment", name)
    container = container_of(deployment)
    args = parse_vllm_serve(container["args"])
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    limit_s = pod_of(deployment)["spec"]["terminationGracePeriodSeconds"]
    # A prefill engine holds blocks for as long as a lease, by default.
    assert pause_s >= 30
    assert limit_s >= pause_s + args.shutdown_timeout + 30


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_replaced_one_after_the_other(name: str) -> None:
    """One is left that serves, and the router has heard of the next before another goes."""
    spec = find("Deployment", name)["spec"]
    strategy = spec["strategy"]["rollingUpdate"]
    assert spec["replicas"] - strategy["maxUnavailable"] >= 1
    probe = container_of(find("Deployment", name))["readinessProbe"]
    assert spec["minReadySeconds"] > probe["periodSeconds"]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_mounts_have_volumes(name: str) -> None:
    """Whatever is mounted is declared, and engines have shared memory."""
    deployment = find("Deployment", name)
    volumes = {volume["name"]: volume for volume in pod_of(deployment)["spec"]["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in container_of(deployment)["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    if name in ENGINES:
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_pods_fit_the_profile_of_the_namespace(name: str) -> None:
    """Pods keep to the rules of "restricted" that manifests have to state."""
    namespace = find("Namespace", read_kustomization()["namespace"])
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    deployment = find("Deployment", name)
    context = pod_of(deployment)["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"]["type"] == "RuntimeDefault"
    own = container_of(deployment)["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_the_router_starts_with_what_it_knows() -> None:
    """All options are the router's; its selectors and port are those of the engines' pods."""
    container = container_of(find("Deployment", "router"))
    args = parse_vllm_router(container["args"])
    assert args.vllm_pd_disaggregation and args.service_discovery and args.kv_connector == "nixl"
    assert args.service_discovery_namespace == read_kustomization()["namespace"]
    ports = ports_of(container)
    assert (args.port, args.prometheus_port) == (ports["http"], ports["metrics"])
    for name, selector in zip(ENGINES, (args.prefill_selector, args.decode_selector), strict=True):
        engine = find("Deployment", name)
        matching = [
            each
            for each in DEPLOYMENTS
            if selector.items() <= pod_of(find("Deployment", each))["metadata"]["labels"].items()
        ]
        assert selector and matching == [name]
        assert args.service_discovery_port == ports_of(container_of(engine))["http"]


def test_the_role_reaches_the_router() -> None:
    """The account of the router's pods is bound to the role that there is."""
    account = pod_of(find("Deployment", "router"))["spec"]["serviceAccountName"]
    assert find("ServiceAccount", account)
    binding = find("RoleBinding", "router")
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", account)
    assert find(binding["roleRef"]["kind"], binding["roleRef"]["name"])


def test_the_network_policy_lets_through_what_is_needed() -> None:
    """Engines hear each other on all ports, the router on one, and nobody else."""
    spec = find("NetworkPolicy", "engines")["spec"]
    chosen = spec["podSelector"]["matchLabels"].items()
    labels = {name: pod_of(find("Deployment", name))["metadata"]["labels"] for name in DEPLOYMENTS}
    assert [name for name in DEPLOYMENTS if chosen <= labels[name].items()] == list(ENGINES)
    among, requests = spec["ingress"]
    (peers,) = among["from"]
    assert peers["podSelector"]["matchLabels"].items() == chosen
    assert "ports" not in among
    (client,) = requests["from"]
    admitted = client["podSelector"]["matchLabels"].items()
    assert [name for name in DEPLOYMENTS if admitted <= labels[name].items()] == ["router"]
    assert requests["ports"] == [{"port": "http"}]


def test_the_dockerfile_builds_the_images_that_are_deployed() -> None:
    """It copies what exists, has both targets, and starts the programs that get the arguments."""
    text = (DIRECTORY / "Dockerfile").read_text()
    instructions = re.sub(r"\\\n", " ", text).splitlines()
    copied = [
        word
        for line in instructions
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
        if not word.startswith("--")
    ]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert stages == ["build", "engine", "plugin", "router"]
    entrypoints = [line for line in instructions if line.startswith("ENTRYPOINT")]
    assert entrypoints == ['ENTRYPOINT ["vllm", "serve"]', 'ENTRYPOINT ["vllm-router"]']
    users = {line.split()[1] for line in instructions if line.startswith("USER ")}
    for name in DEPLOYMENTS:
        assert {
            str(pod_of(find("Deployment", name))["spec"]["securityContext"]["runAsUser"])
        } == users


def test_the_engines_tag_is_the_base_that_its_image_holds() -> None:
    """An image is built for CUDA, from that target's default base."""
    tags = {each["name"]: each["newTag"] for each in read_kustomization()["images"]}
    release = default_release(Project(ROOT), "cuda")
    assert tags["vllm-reshard"] == release
    assert f"/vllm-reshard:{release} ." in (DIRECTORY / "Dockerfile").read_text()


def test_the_dockerfile_takes_the_router_that_is_tested() -> None:
    """The image has the version that the end-to-end tests run with, and its tag says so."""
    (tested,) = re.findall(
        r"^vllm-router==(\S+)$", (ROOT / "requirements/demo.txt").read_text(), re.MULTILINE
    )
    assert f"vllm-router=={tested}\n" in (DIRECTORY / "Dockerfile").read_text()
    tags = {each["name"]: each["newTag"] for each in read_kustomization()["images"]}
    assert tags["vllm-router"] == tested
