"""The command: training runs from a configuration, and verbs that read the directory of a run."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

HOME = Path("runs")  # of run directories, and of MLflow's database if no other store is configured

NO_RUN = "no run there; expected the directory of a run, such as runs/NAME"  # of every verb

VERBS = {  # the words that a command line may begin with; each is a module here
    "incidents": "whether a run is all right, and its incidents",
    "checkpoints": "the checkpoints of a run, and which one a resume loads",
    "status": "the status of a run, with its exit code",
    "examine": "one batch of a run under the microscope: its layers, and what breaks",
    "sync": "upload to MLflow what could not be uploaded during the run",
}


def parser_of(verb: str, description: str, exit_codes: str, json: str = "print a JSON object") -> ArgumentParser:
    """Return the parser of a verb, which takes the directory of a run."""
    prog, epilog, raw = f"resilient-train {verb}", f"exit code: {exit_codes}", RawDescriptionHelpFormatter
    parser = ArgumentParser(prog=prog, description=description, epilog=epilog, formatter_class=raw)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of the run, such as runs/NAME")
    if json:
        parser.add_argument("--json", action="store_true", help=json)
    return parser
