"""Adds up each row, padded to the longest of the batch."""

import numpy as np


class Model:
    def infer(self, inputs):
        x = inputs["x"]
        return {
            "sum": x.sum(axis=1, keepdims=True),
            "plus_one": x + 1,
            "width": np.full((len(x), 1), x.shape[1], np.int32),
        }
