"""Toys for tests: a right backend without a framework, one for each way to be wrong."""
