"""The classifier in PaddlePaddle."""
