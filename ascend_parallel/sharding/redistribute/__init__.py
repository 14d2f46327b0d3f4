"""DTensors on meshes: plans and runs redistributions."""
