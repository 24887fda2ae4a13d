"""What is decided: rules read the whole state and write none of it. Reading a log needs none of them."""
