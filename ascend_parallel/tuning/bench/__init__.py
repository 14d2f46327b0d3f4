"""Time linear layers on this machine: every kernel and chunk count beside the serial path and the bound."""
