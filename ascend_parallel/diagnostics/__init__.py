"""Did it overlap, and is it right: timelines, verification inside a run, and the doctor."""
