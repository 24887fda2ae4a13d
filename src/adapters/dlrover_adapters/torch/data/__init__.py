"""Elastic data for torch: a dataset whose position is saved with the model, and the same global batch at every world size."""
