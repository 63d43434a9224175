"""Porting bugs: one table, injected into backends, tried as explanations, and the proof of both."""
