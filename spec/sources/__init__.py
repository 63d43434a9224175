"""Tables with names and layouts of published sources."""
