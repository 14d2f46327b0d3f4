"""Marked models run eagerly: DTensors whose functions are laid out one call at a time, by the rules of a graph."""
