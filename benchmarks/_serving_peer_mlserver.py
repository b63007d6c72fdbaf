"""The models of benchmarks/serving_vs_peers.py as MLServer wants them: classes, named in model-settings.json."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from _serving_models import MODELS


class _Model(MLModel):
    async def load(self) -> bool:
        """Nothing is to be loaded."""
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run a batch."""
        x = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output("y", MODELS[self.name](x))
        return InferenceResponse(model_name=self.name, outputs=[output])


class Identity(_Model):
    """See the module."""


class Features(_Model):
    """See the module."""


class Timed(_Model):
    """See the module."""
