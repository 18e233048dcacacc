"""Ways into a cache: append, the fused write, `AppendPlan`, and the fast path for small calls."""
