"""Flash checkpoint, the agent's side: memory that outlives workers, the saver's process, and the duty over both."""
