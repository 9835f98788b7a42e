"""The command: its configuration, its run, its terminal, its verbs."""
