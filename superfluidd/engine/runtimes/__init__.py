"""Runtimes: the only importers of the libraries they wrap. The daemon imports none of them but ``simulated``."""
