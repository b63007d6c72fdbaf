"""What other tools already know of a network or of a host's inside, read into a fabric. One module per source."""
