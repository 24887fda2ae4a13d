"""What the kernel of this host says of processes, for everything that owns some. Standard library alone, light to import."""
