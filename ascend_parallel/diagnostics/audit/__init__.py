"""Audit a run by its profiles: what its collectives cost, what hides them, and what this package could hide.

`events` reads a trace as a stream, `profile` makes a rank's profile of it, `roles` tells what a process group is for,
`account` adds up hidden and exposed time, `gain` prices overlap of the measured parts, `report` has the result.
"""
