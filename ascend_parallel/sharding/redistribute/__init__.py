"""DTensors on meshes: redistribution planned and run, reshard, layers and optimizers."""
