"""The command line: one small file per command; only this room prints and exits."""
