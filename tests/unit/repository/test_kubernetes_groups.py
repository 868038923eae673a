"""The Kubernetes example with groups of ranks: valid by the published schemas, and agreed with itself and with Headway.

``LEADER_WORKER_SET`` is what LeaderWorkerSet 0.7's resource definition says of the fields that the example may use, without
its pod templates, which are validated as Kubernetes' own.
"""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("kubernetes_validate", reason="needs the published schemas (extra dev)")

import jsonschema
import kubernetes_validate

from headway.__main__ import parser_of
from headway.commands.keys import make_keys
from headway.planning.services import SERVICES, load
from headway_gateway.operators.health import LIVENESS

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes" / "groups"
KUSTOMIZATION = yaml.safe_load((EXAMPLE / "kustomization.yaml").read_text())
OBJECTS = [loaded for name in KUSTOMIZATION["resources"] for loaded in yaml.safe_load_all((EXAMPLE / name).read_text())]
SETS = [one for one in OBJECTS if one["kind"] == "LeaderWorkerSet"]
OLDEST = "1.30"
COUNT = {"type": "integer", "minimum": 0}
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": COUNT,
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
                "networkConfig": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["subdomainPolicy"],
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
            },
        },
    },
}


def containers() -> dict[str, dict]:
    found = {}
    for one in OBJECTS:
        if one["kind"] in {"Deployment", "LeaderWorkerSet"}:
            template = one["spec"].get("template") or one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            (container,) = template["spec"]["containers"]
            found[one["metadata"]["name"]] = {**container, "pod": template["spec"]}
    return found


CONTAINERS = containers()


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_every_object_is_valid_by_its_schema_and_has_no_unknown_field(one: dict, version: str) -> None:
    if one["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(one, version, strict=True)
        return
    jsonschema.validate(one, LEADER_WORKER_SET)
    template = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
    kubernetes_validate.validate(pods, version, strict=True)


def test_a_wrong_set_would_be_found() -> None:
    wrong = {**SETS[0], "spec": {**SETS[0]["spec"], "replica": 1}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, LEADER_WORKER_SET)


def words_of(name: str, keys: Path, drop: tuple[str, ...] = ()) -> list[str]:
    args = [word for word in CONTAINERS[name]["args"] if not word.startswith(drop)]
    return [word.replace("/run/keys", str(keys)) for word in args]


@pytest.mark.parametrize(
    ("name", "service"),
    [
        ("headway-scheduler", "scheduler"),
        ("headway-gateway", "gateway"),
        ("headway-prefill", "executor"),
        ("headway-decode", "executor"),
    ],
)
def test_every_process_gets_a_valid_configuration_with_the_keys_of_its_secret(
    name: str, service: str, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    known = {setting.flag for setting in SERVICES[service].settings.values()}
    of_groups = tuple(flag for flag in ("--tensor-parallel", "--ranks-address") if flag not in known)
    words = words_of(name, tmp_path / "keys" / service, of_groups)
    words = [word.replace("$(LWS_LEADER_ADDRESS)", "headway-0.headway") for word in words]
    assert load(SERVICES[service], parser_of(service).parse(words), {})


def test_the_links_meet_at_the_scheduler_and_ask_for_keys() -> None:
    (service,) = (one for one in OBJECTS if one["kind"] == "Service" and one["metadata"]["name"] == "headway-scheduler")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    for name in ("headway-prefill", "headway-decode"):
        assert f"--step-address=tcp://headway-scheduler:{ports['step']}" in CONTAINERS[name]["args"]
    assert f"--ingress-address=tcp://headway-scheduler:{ports['ingress']}" in CONTAINERS["headway-gateway"]["args"]
    assert all("--curve-keys=/run/keys" in each["args"] for each in CONTAINERS.values())
    items = {item["path"] for item in CONTAINERS["headway-scheduler"]["pod"]["volumes"][0]["secret"]["items"]}
    assert items == {"scheduler.key_secret", "executors/executor.key", "gateways/gateway.key"}
    for each in CONTAINERS.values():
        assert each["pod"]["volumes"][0]["secret"]["defaultMode"] == 0o440


@pytest.mark.parametrize("one", SETS, ids=lambda one: one["metadata"]["name"])
def test_a_group_has_as_many_ranks_as_its_executor_and_ranks_know_their_place(one: dict) -> None:
    size = one["spec"]["leaderWorkerTemplate"]["size"]
    container = CONTAINERS[one["metadata"]["name"]]
    assert f"--tensor-parallel={size}" in container["args"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables == {
        "RANK": "$(LWS_WORKER_INDEX)",
        "WORLD_SIZE": "$(LWS_GROUP_SIZE)",
        "MASTER_ADDR": "$(LWS_LEADER_ADDRESS)",
        "MASTER_PORT": "29500",
    }
    assert [port["containerPort"] for port in container["ports"]] == [29501, 29502]


def test_as_many_executors_as_the_scheduler_takes_have_a_role() -> None:
    groups = sum(one["spec"]["replicas"] for one in SETS)
    assert f"--max-executors={groups}" in CONTAINERS["headway-scheduler"]["args"]
    (roles,) = (word for word in CONTAINERS["headway-scheduler"]["args"] if word.startswith("--roles="))
    assert len(roles.split(",")) == groups


def test_the_gateway_asks_the_standard_health_service() -> None:
    gateway = CONTAINERS["headway-gateway"]
    assert gateway["livenessProbe"]["grpc"] == {"port": 50051, "service": LIVENESS}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_closed_up(name: str) -> None:
    container = CONTAINERS[name]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert container["image"] in {image["name"] for image in KUSTOMIZATION["images"]}
    assert container["pod"]["securityContext"]["runAsNonRoot"] is True
    assert container["pod"]["automountServiceAccountToken"] is False
