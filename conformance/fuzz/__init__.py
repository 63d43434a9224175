"""Random cases: any configuration of the family on every backend."""
