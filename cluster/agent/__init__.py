"""The first process of every task: the agent. Standard library only, since containers run it.

`cluster/contract/recovery` decides how to respond to a failure; the agent detects failures and acts.
"""
