"""Records a model's forward as a `Graph`: export, in-place operators, function calls, strategy marks, determinism."""
