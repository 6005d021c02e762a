"""The cluster as manifests for Kubernetes: pure functions from a description to objects; nothing here talks to one.

`pods.py` has what every pod is like, `jobs.py` the JobSet or TFJob that starts them, `objects.py` what stands beside.
"""
