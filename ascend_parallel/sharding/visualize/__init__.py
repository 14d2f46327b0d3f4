"""What people read of a plan: words, a page with the graph, advice."""
