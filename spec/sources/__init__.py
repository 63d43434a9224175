"""Names and layouts of every published source, one table each."""
