# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes example, read."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DIRECTORY = Path(__file__).parents[2] / "examples/kubernetes"
Manifest = dict[str, Any]


def read_kustomization() -> Manifest:
    """Return what lists the manifests."""
    kustomization: Manifest = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())
    return kustomization


def read_manifests() -> list[Manifest]:
    """Return every object that the kustomization applies."""
    return deepcopy(_parsed())


@cache
def _parsed() -> list[Manifest]:
    return [
        manifest
        for name in read_kustomization()["resources"]
        for manifest in yaml.safe_load_all((DIRECTORY / name).read_text())
    ]


def read_component(name: str) -> list[Manifest]:
    """Return the objects that an optional part of the kustomization adds, or changes."""
    component = yaml.safe_load((DIRECTORY / name / "kustomization.yaml").read_text())
    files = [
        *component.get("resources", ()),
        *(each["path"] for each in component.get("patches", ())),
    ]
    assert set(files) == {path.name for path in (DIRECTORY / name).iterdir()} - {
        "kustomization.yaml"
    }
    return [yaml.safe_load((DIRECTORY / name / file).read_text()) for file in files]


def find(kind: str, name: str) -> Manifest:
    """Return the one object of that kind and name."""
    (found,) = (
        each
        for each in read_manifests()
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def pod_of(deployment: Manifest) -> Manifest:
    """Return the pod template of a Deployment."""
    template: Manifest = deployment["spec"]["template"]
    return template


def container_of(deployment: Manifest) -> Manifest:
    """Return the only container of a Deployment."""
    (container,) = pod_of(deployment)["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def ports_of(container: Manifest) -> dict[str, int]:
    """Return the ports of a container by name."""
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def env_of(container: Manifest) -> dict[str, Manifest]:
    """Return the environment variables of a container by name, as they are declared."""
    return {variable["name"]: variable for variable in container["env"]}
