"""Random cases of any configuration on every backend."""
