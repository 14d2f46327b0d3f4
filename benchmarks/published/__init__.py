"""Published trainings beside the cost model's predictions: rows with their sources, and the errors by source."""
