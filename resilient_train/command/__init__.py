"""The command: training runs from a configuration, and verbs that read the directory of a run."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

VERBS = ("incidents", "checkpoints", "status", "examine", "sync")  # that a command line may begin with: modules here


def no_run(run_dir: Path) -> int:
    print(f"{run_dir}: no run there; expected the directory of a run, such as runs/NAME", file=sys.stderr)
    return 2


def parser_of(verb: str, description: str, exit_codes: str) -> ArgumentParser:
    parser = ArgumentParser(f"resilient-train {verb}", description=description, epilog=f"exit code: {exit_codes}")
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of the run, such as runs/NAME")
    return parser
