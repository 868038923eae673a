"""The Kubernetes example: valid by the published schemas, agreed with itself, and with what Headway and smg take."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("kubernetes_validate", reason="needs the published schemas (extra dev)")

import kubernetes_validate

from headway.__main__ import parser_of
from headway.planning.services import SERVICES, load
from headway_gateway.operators.health import LIVENESS

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((EXAMPLE / "kustomization.yaml").read_text())
OBJECTS = [loaded for name in KUSTOMIZATION["resources"] for loaded in yaml.safe_load_all((EXAMPLE / name).read_text())]
OLDEST = "1.30"


def of_kind(kind: str, name: str) -> dict:
    (found,) = (one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


REPLICA = of_kind("Deployment", "headway")["spec"]["template"]["spec"]
SMG = of_kind("Deployment", "smg")["spec"]["template"]["spec"]
CONTAINERS = {one["name"]: one for one in (*REPLICA["initContainers"], *REPLICA["containers"], *SMG["containers"])}


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_every_object_is_valid_by_the_published_schema_and_has_no_unknown_field(one: dict, version: str) -> None:
    kubernetes_validate.validate(one, version, strict=True)


def test_a_wrong_object_would_be_found() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"portz": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_gets_a_valid_configuration(service: str) -> None:
    config = load(SERVICES[service], parser_of(service).parse(CONTAINERS[service]["args"]), {})
    assert type(config) is SERVICES[service].struct


def test_the_processes_of_a_pod_agree_and_have_time_to_drain() -> None:
    arguments = {name: set(CONTAINERS[name]["args"]) for name in SERVICES}
    assert "--step-address=ipc:///run/headway/step" in arguments["scheduler"] & arguments["executor"]
    assert "--ingress-address=ipc:///run/headway/ingress" in arguments["scheduler"] & arguments["gateway"]
    assert "--model=demo" in arguments["executor"] & arguments["gateway"]
    # Sidecars end after the gateway, the last one first.
    assert [one["name"] for one in REPLICA["initContainers"]] == ["executor", "scheduler"]
    assert {one["restartPolicy"] for one in REPLICA["initContainers"]} == {"Always"}
    configs = {
        name: load(SERVICES[name], parser_of(name).parse(CONTAINERS[name]["args"]), {})
        for name in ("gateway", "scheduler")
    }
    before_stop = CONTAINERS["gateway"]["lifecycle"]["preStop"]["sleep"]["seconds"]
    draining = before_stop + sum(config.grace_s for config in configs.values())
    assert draining < REPLICA["terminationGracePeriodSeconds"]


def test_probes_ask_the_standard_health_service_and_liveness_asks_for_the_gateway_alone() -> None:
    gateway = CONTAINERS["gateway"]
    (port,) = gateway["ports"]
    assert gateway["startupProbe"]["grpc"] == gateway["readinessProbe"]["grpc"] == {"port": port["containerPort"]}
    assert gateway["livenessProbe"]["grpc"] == {"port": port["containerPort"], "service": LIVENESS}
    assert f"--grpc-address=0.0.0.0:{port['containerPort']}" in gateway["args"]
    assert f"--service-discovery-port={port['containerPort']}" in CONTAINERS["smg"]["args"]


def test_selectors_find_what_they_are_for() -> None:
    labels = {
        name: of_kind("Deployment", name)["spec"]["template"]["metadata"]["labels"] for name in ("headway", "smg")
    }
    for name, wanted in labels.items():
        assert of_kind("Deployment", name)["spec"]["selector"]["matchLabels"] == wanted
        assert of_kind("Service", name)["spec"]["selector"] == wanted
        assert of_kind("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"] == wanted
    words = CONTAINERS["smg"]["args"]
    assert dict(word.split("=") for word in words[words.index("--selector") + 1 :]) == labels["headway"]
    (rule,) = of_kind("NetworkPolicy", "headway")["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels["smg"]}}]


def test_smg_may_look_at_pods_of_its_namespace_and_do_nothing_else() -> None:
    assert SMG["serviceAccountName"] == of_kind("ServiceAccount", "smg")["metadata"]["name"]
    assert of_kind("RoleBinding", "smg")["roleRef"]["name"] == "smg"
    assert of_kind("Role", "smg")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
    assert not [one for one in OBJECTS if one["kind"].startswith("Cluster")]
    assert REPLICA["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_closed_up(name: str) -> None:
    container = CONTAINERS[name]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["cpu"]
    assert container["image"] in {image["name"] for image in KUSTOMIZATION["images"]}
    for pod in (REPLICA, SMG):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
