"""Ways into a cache: append, the fused write, `AppendPlan`, and the short way for small calls."""
