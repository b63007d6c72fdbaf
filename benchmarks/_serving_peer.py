"""One peer of benchmarks/serving_vs_peers.py: the three models behind its own server, in its own environment.

    python _serving_peer.py litserve|bentoml|mlserver|ray|triton PORT FOLDER

Every peer gets what its documentation names for speed: batches of at most 32 rows within 2 ms, one model process,
binary bodies where it takes them. Nothing of wirespeed is imported here.
"""

import json
import os
import sys
from pathlib import Path

from _serving_models import ITEMS, MAX_DELAY_S, MAX_ROWS, MODELS, from_bytes

HERE = Path(__file__).resolve().parent
DATATYPES = {"float32": "FP32", "uint8": "UINT8"}


def litserve(port, folder):
    """See _serving_peer_litserve.py: its workers have to import the class."""
    from _serving_peer_litserve import serve

    serve(port)


BENTO = """
from typing import Annotated

import bentoml
import numpy as np
from _serving_models import MAX_ROWS, MODELS
from bentoml.validators import DType

Floats, Bytes = Annotated[np.ndarray, DType("float32")], Annotated[np.ndarray, DType("uint8")]


@bentoml.service(workers=1, traffic={"timeout": 60})
class Peer:
    @bentoml.api(batchable=True, max_batch_size=MAX_ROWS, max_latency_ms=60_000)
    def identity(self, x: Floats) -> Floats:
        return MODELS["identity"](x)

    @bentoml.api(batchable=True, max_batch_size=MAX_ROWS, max_latency_ms=60_000)
    def features(self, x: Bytes) -> Floats:
        return MODELS["features"](x)

    @bentoml.api(batchable=True, max_batch_size=MAX_ROWS, max_latency_ms=60_000)
    def timed(self, x: Floats) -> Floats:
        return MODELS["timed"](x)
"""


def bentoml(port, folder):
    """Arrays as JSON, the only bodies of arrays that it takes from outside, with its adaptive batching.

    Its bound of latency is wide, since it refuses requests (503) that it expects to miss it.
    """
    (folder / "service.py").write_text(BENTO)
    os.chdir(folder)
    command = [sys.executable, "-m", "bentoml", "serve", "service:Peer", "--host", "127.0.0.1", "--port", str(port)]
    os.execv(sys.executable, command)


def mlserver(port, folder):
    """Open Inference Protocol v2 over gRPC, in one process: faster here than with its worker processes."""
    for name, (datatype, width, out) in ITEMS.items():
        model = folder / name
        model.mkdir()
        settings = {
            "name": name,
            "implementation": f"_serving_peer_mlserver.{name.capitalize()}",
            "max_batch_size": MAX_ROWS,
            "max_batch_time": MAX_DELAY_S,
            "inputs": [{"name": "x", "datatype": DATATYPES[datatype], "shape": [-1, width]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, out]}],
        }
        (model / "model-settings.json").write_text(json.dumps(settings))
    server = {"host": "127.0.0.1", "grpc_port": port, "http_port": port + 1, "metrics_port": port + 2}
    server |= {"parallel_workers": 0, "debug": False, "grpc_max_message_length": 2**28}
    (folder / "settings.json").write_text(json.dumps(server))
    script = Path(sys.executable).with_name("mlserver")
    os.execv(sys.executable, [sys.executable, str(script), "start", str(folder)])


def ray(port, folder):
    """Raw bytes in and out over Serve's HTTP proxy, one replica per model."""
    import ray as engine
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    limits = {"num_cpus": 2, "object_store_memory": 2**27}
    engine.init(include_dashboard=False, log_to_driver=False, _temp_dir=str(folder / "ray"), **limits)
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    def deployment(name):
        @serve.deployment(name=name, num_replicas=1, max_ongoing_requests=128, ray_actor_options={"num_cpus": 0.5})
        class Model:
            @serve.batch(max_batch_size=MAX_ROWS, batch_wait_timeout_s=MAX_DELAY_S)
            async def run(self, bodies):
                return [row.tobytes() for row in MODELS[name](from_bytes(name, bodies))]

            async def __call__(self, request: Request):
                return Response(await self.run(await request.body()), media_type="application/octet-stream")

        return Model

    for name in MODELS:
        serve.run(deployment(name).bind(), name=name, route_prefix=f"/{name}")
    import threading

    threading.Event().wait()


def triton(port, folder):
    """NVIDIA Triton with Python callables, through nvidia-pytriton; Open Inference Protocol v2 over gRPC."""
    import numpy as np
    from pytriton.decorators import batch
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    config = TritonConfig(
        grpc_address="127.0.0.1", grpc_port=port, http_address="127.0.0.1", http_port=port + 1, allow_metrics=False
    )
    with Triton(config=config) as server:
        for name, (datatype, width, out) in ITEMS.items():

            def run(x, name=name):
                return {"y": MODELS[name](x)}

            server.bind(
                model_name=name,
                infer_func=batch(run),
                inputs=[Tensor(name="x", dtype=np.dtype(datatype).type, shape=(width,))],
                outputs=[Tensor(name="y", dtype=np.float32, shape=(out,))],
                config=ModelConfig(
                    max_batch_size=MAX_ROWS,
                    batcher=DynamicBatcher(max_queue_delay_microseconds=round(MAX_DELAY_S * 1e6)),
                ),
                strict=False,
            )
        server.serve()


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    {"litserve": litserve, "bentoml": bentoml, "mlserver": mlserver, "ray": ray, "triton": triton}[sys.argv[1]](
        int(sys.argv[2]), Path(sys.argv[3])
    )
