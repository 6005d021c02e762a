"""`--bitwise-elastic`: the same bits with any number of replicas."""
