"""A model's forward recorded as a `Graph`: export, in-place operators, function calls, strategy marks, determinism."""
