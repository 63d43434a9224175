"""Random cases: any configuration of the family on every backend, and each failure made as small as can
be.
"""
