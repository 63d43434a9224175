"""A catalogue of bugs."""
