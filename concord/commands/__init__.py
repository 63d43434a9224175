"""The commands, each in the file of its name."""
