"""Deploying: `ray up` clusters, the head service, and rollouts on Kubernetes."""
