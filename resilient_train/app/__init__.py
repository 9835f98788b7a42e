"""The command: training runs from a configuration, and verbs that read the directory of a run."""

from pathlib import Path

HOME = Path("runs")  # of run directories, and of MLflow's database if no other store is configured

VERBS = {  # the words that a command line may begin with; each is a module here
    "incidents": "whether a run is all right, and its incidents",
    "checkpoints": "the checkpoints of a run, and which one a resume loads",
    "status": "the status of a run, with its exit code",
    "examine": "one batch of a run under the microscope: its layers, and what breaks",
    "sync": "upload to MLflow what could not be uploaded during the run",
}
