"""The verbs, a module per family."""
