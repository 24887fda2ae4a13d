"""The master and the agent, over the ports transport, launcher, backend and log. asyncio and stdlib only; structlog for logs."""
