"""The models of benchmarks/serving_vs_peers.py as LitServe wants them: a class that its worker processes can import.

Raw bytes in and out over HTTP; requests reach the worker process through LitServe's ZeroMQ queue.
"""

from typing import Annotated

import litserve
from fastapi import Body
from starlette.responses import Response

from _serving_models import MAX_DELAY_S, MAX_ROWS, MODELS, from_bytes


class Api(litserve.LitAPI):
    """One model, named by its path."""

    def setup(self, device):
        """Nothing is to be loaded."""

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]):
        """The body as it came."""
        return request

    def batch(self, inputs):
        """Rows joined."""
        return from_bytes(self.api_path.strip("/"), inputs)

    def predict(self, x):
        """Run a batch."""
        return MODELS[self.api_path.strip("/")](x)

    def unbatch(self, output):
        """Rows apart."""
        return [row.tobytes() for row in output]

    def encode_response(self, output):
        """The body as it goes."""
        return Response(output, media_type="application/octet-stream")


def serve(port):
    """Serve every model until the process ends."""
    apis = [Api(max_batch_size=MAX_ROWS, batch_timeout=MAX_DELAY_S, api_path=f"/{name}") for name in MODELS]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1, fast_queue=True, timeout=60)
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False, num_api_servers=1)
