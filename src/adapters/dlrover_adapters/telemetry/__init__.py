"""structlog, set up once per process by whoever owns the process."""
