"""The version of the package."""

__version__ = "0.1.0"

if __name__ == "__main__":
    print(__version__)  # noqa: T201  for shells: docs/releasing.md
