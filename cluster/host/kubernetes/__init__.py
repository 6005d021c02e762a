"""A run as manifests for Kubernetes; nothing here talks to a cluster."""
