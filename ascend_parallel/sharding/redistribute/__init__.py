"""DTensors on meshes: plans and runs redistributions; reshard, shard_layer, shard_optimizer."""
