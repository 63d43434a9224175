"""Containers: what lies in a file by its own names, whatever they mean. Each module reads one kind of file, and writes it."""
