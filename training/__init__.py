"""Training: data, lockstep and ordinary training, prediction, and pictures of what a model attends to."""
