"""The Kubernetes manifest names options, probes and ports that there are."""

from __future__ import annotations

from pathlib import Path

import typer.main
import yaml

from wirespeed.cli.main import app
from wirespeed.serve.node_addresses import parse_nodes
from wirespeed.wire.sockets import split_address

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "nodes.yaml"


def test_the_manifest_starts_a_node_that_its_service_and_probes_reach() -> None:
    service, deployment = yaml.safe_load_all(MANIFEST.read_text())
    pod = deployment["spec"]["template"]
    container = pod["spec"]["containers"][0]
    program, name, *arguments = container["command"]
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    with command.make_context(name, [str(argument) for argument in arguments]) as context:
        given = context.params
    assert (program, given["grpc"]) == ("wirespeed", "none")
    ports = {port["containerPort"] for port in container["ports"]}
    assert {split_address(given[door])[1] for door in ("node", "http")} == ports
    assert service["spec"]["ports"][0]["port"] == split_address(given["node"])[1]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert container["readinessProbe"]["httpGet"]["port"] in ports
    assert pod["spec"]["terminationGracePeriodSeconds"] > 30
    assert parse_nodes("dns:localhost:7000")
