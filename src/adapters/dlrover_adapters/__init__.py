"""The world outside: launchers, transports, logs and frameworks. Each module may import its own third party."""
