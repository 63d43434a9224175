"""Names and layouts of every published source and of the checkpoints of BERT: a table for each, and their reader."""
