"""Reports about a plan: text, an HTML page with the graph, and advice which operators to configure."""
