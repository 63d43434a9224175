"""One catalogue of bugs: each is injected into backends as a mutant, and tried as an explanation."""
