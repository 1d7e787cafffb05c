"""What DeltaStrategy says of uses of Flower that importance weights, or the Message API, rule out."""

#: Said when the strategy is wrapped or driven by another one.
FOREIGN_PRIVACY = (
    "DeltaStrategy was called by another strategy, not started. Flower's wrappers for differential privacy assume that "
    "every reply counts 1 / n; importance weights count some far more, which voids their guarantee. Call "
    "DeltaStrategy.start, and write clipping=WeightedClipping(norm, noise_multiplier) to clip and blur instead"
)
#: Said when a legacy workflow starts it.
SECURE_AGGREGATION = (
    "SecAgg+ works with Flower's legacy strategies alone, and DeltaStrategy uses the Message API; run it with "
    "DeltaStrategy.start, without secure aggregation"
)
