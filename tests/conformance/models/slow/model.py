"""Takes as long as its parameter says, and counts its calls."""

import time


class Model:
    def infer(self, inputs):
        time.sleep(float(inputs["seconds"].reshape(-1)[0]))
        return {"seconds_out": inputs["seconds"]}
