"""Names and layouts of every published source and of the checkpoints of BERT.

A table for each, and their reader.
"""
