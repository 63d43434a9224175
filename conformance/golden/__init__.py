"""Published tensors, and their reader."""
