"""ElasticJobs: DLRover's custom resource, as its users write it, and the operator that keeps it true (docs/kubernetes.md)."""
