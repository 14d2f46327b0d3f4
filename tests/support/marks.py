"""Marks of tests: ``@promise("name")`` says which rows of docs/promises.md a test holds."""

import pytest

promise = pytest.mark.promise
