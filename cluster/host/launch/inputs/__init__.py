"""What a user gives a run beside its options: a script, packages, weights to begin with."""
