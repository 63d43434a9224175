"""A catalogue of bugs, injected into backends as mutants and tested as explanations."""
