"""Patches of frameworks: `base` has the mechanics, a folder for each framework the replacements.

Only this package depends on frameworks.
"""
