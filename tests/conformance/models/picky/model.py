"""Fails for negative numbers, dies of 13, and otherwise doubles; gives the rows of its batch beside."""

import os

import numpy as np


class Model:
    def infer(self, inputs, batch):
        x = inputs["x"]
        if (x == 13).any():
            os._exit(13)
        if (x < 0).any():
            raise ValueError("a negative number")
        return {"y": x * 2, "rows": np.full((len(x), 1), len(x), np.int32)}
