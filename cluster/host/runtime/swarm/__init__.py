"""The cluster as a stack of a Docker Swarm: a service for each task, on whichever hosts the Swarm has.

`runtime.py` is what the rest knows, `stack.py` describes the services, `nodes.py` asks the Swarm about its hosts, and
`faults.py` disturbs tasks there. What runs first in each container is `cluster/agent/schedulers/service.py`.
"""
