"""The run's story: for the terminal, for files, and for MLflow."""
