"""Start ranks and build slow links for measurements; used by `bench`, `tune`, `doctor` and benchmarks/."""
