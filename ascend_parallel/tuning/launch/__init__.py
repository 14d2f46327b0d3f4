"""Start ranks and launches, end them with all that they started, and build slow links for measurements."""
