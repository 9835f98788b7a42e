"""Two hosts, as two sets of namespaces on this machine: `scripts/two_hosts`, in its short form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from kills import in_journal, stand

sys.path.insert(0, str(ROOT / "scripts"))

import two_hosts

WHY_NOT = two_hosts.lacking()


@pytest.mark.timeout(1500)
@pytest.mark.skipif(bool(WHY_NOT), reason=f"no two hosts can be had here: {WHY_NOT}")
def test_a_cut_link_and_a_lost_host_do_not_end_a_run(tmp_path: Path) -> None:
    """It waits for the link, and goes on alone with the same global batch when the other host is gone for good."""
    command = [sys.executable, str(ROOT / "scripts/two_hosts.py"), "--place", str(tmp_path), "--no-other"]
    command += ["--cut", "2", "--step-timeout", "8", "--patience", "400"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trains: 2 processes" in done.stdout
    assert "went on by itself" in done.stdout
    assert "the other went on alone (1 process)" in done.stdout
    run_dir = tmp_path / "runs/run"
    assert stand(run_dir).stop - stand(run_dir).start == 64
    opened = [entry["incident"]["signal"] for entry in in_journal(run_dir, "incident_opened")]
    assert opened == ["hang"]
    left = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert "card" not in left
