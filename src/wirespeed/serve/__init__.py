"""Inference: front doors, batching, models in worker processes."""
