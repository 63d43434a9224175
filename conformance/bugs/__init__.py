"""One catalogue of bugs, injected into backends as mutants and tried as explanations."""
