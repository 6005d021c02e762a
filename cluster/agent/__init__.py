"""The first process of every task. Standard library only: it is all that a container needs of `cluster`."""
