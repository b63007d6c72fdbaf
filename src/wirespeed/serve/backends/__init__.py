"""What runs a model, behind one small protocol. Which one a model uses stands in its ``model.toml``."""

from wirespeed.serve.backends.base import Backend, Batch, Loaded, load_backend

__all__ = ["Backend", "Batch", "Loaded", "load_backend"]
