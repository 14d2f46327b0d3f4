"""One model of the time of a training step: orders of pipelines, their timing, and sums of gradients around them."""
