"""The master and the agent, over ports: transport, launcher, backend, log. asyncio and stdlib; structlog for logs."""
