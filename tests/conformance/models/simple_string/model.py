"""Sum and difference of numbers written as text."""

import numpy as np


class Model:
    def infer(self, inputs):
        a, b = (np.vectorize(int)(inputs[name]) for name in ("INPUT0", "INPUT1"))
        texts = np.vectorize(lambda value: str(value).encode(), otypes=[object])
        return {"OUTPUT0": texts(a + b), "OUTPUT1": texts(a - b)}
