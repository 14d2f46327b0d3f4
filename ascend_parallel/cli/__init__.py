"""The command `ascend-parallel`, with typer and rich; training processes never import this package."""
