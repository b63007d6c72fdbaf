"""The server that the conformance suite talks to: the real command, in a process and an environment of its own.

WIRESPEED_SERVER_PYTHON names the interpreter that has wirespeed, where the suite runs in another one (`make conformance`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODELS = Path(__file__).parent / "models"


class Serving:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], document: dict[str, str]) -> None:
        self.process = process
        self.grpc = document["grpc"]
        self.http = document["http"]


@contextmanager
def serving(*options: str, models: Path = MODELS, token: str | None = None) -> Iterator[Serving]:
    """The command ``wirespeed serve`` on ports of the kernel's choice, ended with SIGTERM."""
    python = os.environ.get("WIRESPEED_SERVER_PYTHON", sys.executable)
    command = [
        python,
        "-m",
        "wirespeed",
        "serve",
        str(models),
        "--grpc",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--json",
        *options,
    ]
    environment = {key: value for key, value in os.environ.items() if key != "WIRESPEED_TOKEN"}
    if token is not None:
        environment["WIRESPEED_TOKEN"] = token
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended with {process.wait(10)}")
            text += line
        yield Serving(process, json.loads(text))
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
