"""The classifier in PyTorch."""
