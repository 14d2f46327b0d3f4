"""From the strategies of a few operators to a plan for all: options, costs, the exact search."""
