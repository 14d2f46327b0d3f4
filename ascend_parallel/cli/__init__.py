"""The command `ascend-parallel`: typer and rich, never imported by training processes."""
