"""The commands `dlrover` and `dlrover-run`: where everything is put together. May import all packages."""
