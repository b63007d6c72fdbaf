"""A data set through a model: scattered over nodes, gathered in order, one result or one error row per input."""
