"""What the network is: data and arithmetic, no I/O but fabric.toml."""
