"""Training in lockstep: the same batches through several backends, each step judged."""
