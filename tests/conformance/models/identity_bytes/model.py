"""Gives back what it is given."""


class Model:
    def infer(self, inputs):
        return {"OUTPUT0": inputs["INPUT0"]}
