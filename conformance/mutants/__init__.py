"""Porting bugs on purpose: proof that the judgement finds them, and where."""
