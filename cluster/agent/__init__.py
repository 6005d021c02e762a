"""The first process of every task: the agent. Standard library only, since containers run it.

What is done about a failure is decided in `cluster/contract/recovery`; here it is noticed and acted on.
"""
