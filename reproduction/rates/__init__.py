"""Table 1: the decay of the gradient, measured on problems where it is known exactly."""
