"""How a run is shown: its story and review, read from the run directory, and the process that uploads it to MLflow."""
