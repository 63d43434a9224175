"""The operations of bugs in each framework."""
