"""What carries a run into MLflow: a process of its own, which reads the run directory and nothing else."""
