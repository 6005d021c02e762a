"""`--bitwise-elastic`: the same bits on any number of replicas."""
