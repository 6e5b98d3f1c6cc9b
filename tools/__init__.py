"""The command line: ``kvtiers``."""
