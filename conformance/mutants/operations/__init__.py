"""The operations of faults in each framework."""
