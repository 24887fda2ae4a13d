"""Flash checkpoint, the worker's side: what is captured when, how it is copied without stopping the step, and restored."""
