# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes manifests are valid, and what they say of each other is so."""

from __future__ import annotations

import inspect
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
from vllm.v1.metrics import loggers

from tests.examples.checks import ROLES, check_kv_transfer, exported_samples
from tests.examples.manifests import (
    DIRECTORY,
    Manifest,
    container_of,
    env_of,
    find,
    pod_of,
    ports_of,
    read_component,
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


def _selected(selector: Manifest) -> list[str]:
    """Return the Deployments whose pods a selector chooses."""
    assert set(selector) == {"matchLabels"}
    chosen = selector["matchLabels"].items()
    labels = {name: pod_of(find("Deployment", name))["metadata"]["labels"] for name in DEPLOYMENTS}
    return [name for name in DEPLOYMENTS if chosen <= labels[name].items()]


def _validate(manifests: list[Manifest]) -> None:
    """Check that each object has the fields of its schema and no others."""
    for manifest in manifests:
        for version in KUBERNETES_VERSIONS:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise AssertionError(f"{_id(manifest)} on {version}: {error}") from error


def _kubectl_builds(directory: Path, home: Path) -> list[Manifest]:
    """Return what kubectl would apply."""
    built = subprocess.run(
        ["kubectl", "kustomize", str(directory)],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))


needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed"
)


def test_manifests_are_valid() -> None:
    """Every object has the fields of its schema and no others, those of components, too."""
    monitor, rules, policy = read_component("monitoring")
    # What changes the engines is no whole Deployment: that is validated once it is built.
    _, namespace = read_component("rdma")
    _validate([*read_manifests(), policy, namespace])
    for each, kind in ((monitor, "PodMonitor"), (rules, "PrometheusRule")):
        assert (each["apiVersion"], each["kind"]) == ("monitoring.coreos.com/v1", kind)


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


@needs_kubectl
def test_kubectl_builds_the_kustomization(tmp_path: Path) -> None:
    """What kubectl would apply is what is written, with images of a registry."""
    objects = _kubectl_builds(DIRECTORY, tmp_path)
    assert sorted(map(_id, objects)) == sorted(map(_id, read_manifests()))
    images = {each["name"]: each for each in read_kustomization()["images"]}
    for name in DEPLOYMENTS:
        (deployed,) = (each for each in objects if _id(each) == f"Deployment-{name}")
        image = images[container_of(find("Deployment", name))["image"]]
        assert container_of(deployed)["image"] == f"{image['newName']}:{image['newTag']}"


@needs_kubectl
def test_kubectl_builds_it_with_components(tmp_path: Path) -> None:
    """All that they add is there, and engines have RDMA devices beside what they have."""
    place = os.path.relpath(DIRECTORY, tmp_path.resolve())
    components = [f"{place}/{each}" for each in ("monitoring", "rdma")]
    kustomization = {"resources": [place], "components": components}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    objects = _kubectl_builds(tmp_path, tmp_path)
    added = map(_id, [*read_manifests(), *read_component("monitoring")])
    assert sorted(map(_id, objects)) == sorted(added)
    built = {_id(each): each for each in objects}
    _validate([built[f"Deployment-{name}"] for name in DEPLOYMENTS])
    change, _ = read_component("rdma")
    for name in ENGINES:
        plain, engine = (
            container_of(each) for each in (find("Deployment", name), built[f"Deployment-{name}"])
        )
        own = container_of(change)
        assert env_of(engine) == {**env_of(plain), **env_of(own)}
        assert engine["resources"]["limits"] == {
            **plain["resources"]["limits"],
            **own["resources"]["limits"],
        }
        assert engine["volumeMounts"] == plain["volumeMounts"]
        assert engine["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert pod_of(built["Deployment-router"])["spec"]["securityContext"]["runAsNonRoot"] is True
    labels = built[f"Namespace-{read_kustomization()['namespace']}"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"


def test_engines_with_rdma_may_pin_memory() -> None:
    """What is changed is the engines' container, as root: others are given no capability."""
    kustomization = yaml.safe_load((DIRECTORY / "rdma/kustomization.yaml").read_text())
    target, namespace = (each["target"] for each in kustomization["patches"])
    assert (target["kind"], namespace) == ("Deployment", {"kind": "Namespace"})
    key, _, value = target["labelSelector"].partition("=")
    assert _selected({"matchLabels": {key: value}}) == list(ENGINES)
    change, profile = read_component("rdma")
    assert pod_of(change)["spec"]["securityContext"] == {"runAsNonRoot": False, "runAsUser": 0}
    container = container_of(change)
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert {"UCX_TLS", "UCX_NET_DEVICES"} == set(env_of(container))
    for name in ENGINES:
        assert container["name"] == container_of(find("Deployment", name))["name"]
        assert not set(env_of(container)) & set(env_of(container_of(find("Deployment", name))))
    assert profile["metadata"]["name"] == read_kustomization()["namespace"]


def test_prometheus_is_told_of_the_engines_and_let_in() -> None:
    """It looks for their pods, asks the port that they have, and a policy lets it."""
    monitor, _, policy = read_component("monitoring")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert _selected(monitor["spec"]["selector"]) == list(ENGINES)
    assert _selected(policy["spec"]["podSelector"]) == list(ENGINES)
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": endpoint["port"]}]
    assert "namespaceSelector" in rule["from"][0]
    for name in ENGINES:
        assert endpoint["port"] in ports_of(container_of(find("Deployment", name)))
    for each in (monitor, policy):
        assert each["metadata"]["namespace"] == read_kustomization()["namespace"]


def test_alerts_are_of_metrics_that_exist() -> None:
    """Expressions name metrics and reasons of the connector, and all that may fail has an alert."""
    _, rules, _ = read_component("monitoring")
    (group,) = rules["spec"]["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    exported, used = exported_samples(), set()
    for rule in group["rules"]:
        found = re.findall(r"(vllm:[a-z_]+)(?:\{reason[=!~]+\"([a-z_|]+)\"\})?", rule["expr"])
        assert found and rule["expr"].count("{") == sum(bool(reasons) for _, reasons in found)
        assert rule["expr"].count("(") == rule["expr"].count(")")
        for name, reasons in found:
            if name in exported:
                assert set(reasons.split("|")) <= {"", *exported[name]}
            else:
                # vLLM's own.
                assert f'"{name}"' in inspect.getsource(loggers)
        used |= {name for name, _ in found}
        assert set(rule["annotations"]) == {"summary", "description"}
        # What a sum leaves of the labels, an annotation may name.
        labels = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        sums = re.findall(r"sum by \(([^)]+)\)", rule["expr"])
        assert all(labels <= set(each.split(", ")) for each in sums)
    assert used >= {
        "vllm:nixl_read_failures_total",
        "vllm:nixl_handshake_failures_total",
        "vllm:nixl_num_kv_expired_reqs_total",
        "vllm:nixl_kv_blocks_in_doubt",
        "vllm:nixl_held_blocks",
    }


def test_labels_lead_to_the_pods() -> None:
    """What belongs to a role selects its pods, and those of no other."""
    for name in DEPLOYMENTS:
        selectors = [
            find("Deployment", name)["spec"]["selector"],
            {"matchLabels": find("Service", name)["spec"]["selector"]},
        ]
        if name in ENGINES:
            (spread,) = pod_of(find("Deployment", name))["spec"]["topologySpreadConstraints"]
            budget = find("PodDisruptionBudget", name)["spec"]
            selectors += [spread["labelSelector"], budget["selector"]]
        assert [_selected(each) for each in selectors] == [[name]] * len(selectors)


def test_ports_have_the_names_by_which_they_are_called() -> None:
    """Services and probes name ports that the container has, and it listens on them."""
    for name in DEPLOYMENTS:
        container = container_of(find("Deployment", name))
        ports = ports_of(container)
        assert {port["targetPort"] for port in find("Service", name)["spec"]["ports"]} == set(ports)
        probes = [container[probe] for probe in container if probe.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} == {"http"}
        assert f"--port={ports['http']}" in container["args"]


def test_headless_services_call_ports_by_their_numbers() -> None:
    """Nothing translates ports between a headless Service and a pod: both have the same."""
    for name in ENGINES:
        service = find("Service", name)
        assert service["spec"]["clusterIP"] == "None"
        ports = ports_of(container_of(find("Deployment", name)))
        assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports


def test_engines_start_with_what_vllm_knows() -> None:
    """All options are vLLM's, and the engine has a GPU for each of its ranks."""
    for name in ENGINES:
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


def test_the_side_channel_is_where_others_are_told() -> None:
    """Its address is the pod's own, and its port the one that the pod declares."""
    for name in ENGINES:
        container = container_of(find("Deployment", name))
        env = env_of(container)
        host = env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert host == "status.podIP"
        port = int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"])
        assert ports_of(container)["side-channel"] == port


def test_secrets_are_referred_to_only() -> None:
    """No token stands in a manifest."""
    for name in ENGINES:
        token = env_of(container_of(find("Deployment", name)))["HF_TOKEN"]
        assert "value" not in token
        assert token["valueFrom"]["secretKeyRef"]["optional"] is True
        assert not [each for each in read_manifests() if each["kind"] == "Secret"]


def test_engines_are_given_the_key_in_a_way_that_they_take() -> None:
    """It comes from the Secret that the README makes, where it is looked for, and not to all."""
    for name in ENGINES:
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


def test_engines_are_given_the_time_to_end() -> None:
    """The pod may take as long as preStop and the engine's own time together, and some more."""
    for name in ENGINES:
        deployment = find("Deployment", name)
        container = container_of(deployment)
        args = parse_vllm_serve(container["args"])
        pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        limit_s = pod_of(deployment)["spec"]["terminationGracePeriodSeconds"]
        # A prefill engine holds blocks for as long as a lease, by default.
        assert pause_s >= 30
        assert limit_s >= pause_s + args.shutdown_timeout + 30


def test_engines_are_replaced_one_after_the_other() -> None:
    """One is left that serves, and the router has heard of the next before another goes."""
    for name in ENGINES:
        spec = find("Deployment", name)["spec"]
        strategy = spec["strategy"]["rollingUpdate"]
        evicted = find("PodDisruptionBudget", name)["spec"]["maxUnavailable"]
        assert spec["replicas"] - max(strategy["maxUnavailable"], evicted) >= 1
        probe = container_of(find("Deployment", name))["readinessProbe"]
        assert spec["minReadySeconds"] > probe["periodSeconds"]


def test_mounts_have_volumes() -> None:
    """Whatever is mounted is declared, and engines have shared memory."""
    for name in DEPLOYMENTS:
        deployment = find("Deployment", name)
        volumes = {volume["name"]: volume for volume in pod_of(deployment)["spec"]["volumes"]}
        mounts = {
            each["mountPath"]: each["name"] for each in container_of(deployment)["volumeMounts"]
        }
        assert set(mounts.values()) == set(volumes)
        if name in ENGINES:
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_pods_fit_the_profile_of_the_namespace() -> None:
    """Pods keep to the rules of "restricted" that manifests have to state."""
    for name in DEPLOYMENTS:
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
    """Engines hear and ask each other on all ports, the router asks one, all look up names."""
    spec = find("NetworkPolicy", "engines")["spec"]
    assert _selected(spec["podSelector"]) == list(ENGINES)
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    among, requests = spec["ingress"]
    to_each_other, dns = spec["egress"]
    for peers in (among["from"], to_each_other["to"]):
        assert [_selected(each["podSelector"]) for each in peers] == [list(ENGINES)]
    assert "ports" not in among and "ports" not in to_each_other
    (client,) = requests["from"]
    assert _selected(client["podSelector"]) == ["router"]
    assert requests["ports"] == [{"port": "http"}]
    router = find("NetworkPolicy", "router")["spec"]
    assert (_selected(router["podSelector"]), router["policyTypes"]) == (["router"], ["Egress"])
    to_engines, routers_dns, _ = router["egress"]
    (engines,) = to_engines["to"]
    assert _selected(engines["podSelector"]) == list(ENGINES)
    assert to_engines["ports"] == requests["ports"]
    assert routers_dns == dns
    assert [each["port"] for each in dns["ports"]] == [53, 53]
    assert _selected(find("NetworkPolicy", "model-hub")["spec"]["podSelector"]) == list(ENGINES)


def test_what_engines_keep_has_a_place() -> None:
    """Weights, and caches below HOME, go to volumes: nothing else can be written to."""
    for name in ENGINES:
        deployment = find("Deployment", name)
        container, env = container_of(deployment), env_of(container_of(deployment))
        mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        for variable in ("HOME", "HF_HOME"):
            assert not mounts[env[variable]["value"]].get("readOnly")
        assert env["USER"]["value"]
        assert f"HOME={env['HOME']['value']}\n" in (DIRECTORY / "Dockerfile").read_text()


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
    users = [line.split()[1] for line in instructions if line.startswith("USER ")]
    assert len(users) == len(stages) - 1
    for name in DEPLOYMENTS:
        context = pod_of(find("Deployment", name))["spec"]["securityContext"]
        assert {str(context["runAsUser"])} == set(users)


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
