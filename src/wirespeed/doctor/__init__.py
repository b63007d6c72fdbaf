"""What is wrong: checks of a host and of what its network does, each finding with evidence, a remedy and its source.

The checks of one host (check, inventory, host, nic, ...) use the standard library only, and so does importing this
room: they are packed and run on hosts where nothing but Python is installed.
"""
