"""What a hung run logs and saves when its watchdog ends it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from resilient_train.app.build import Run
from resilient_train.app.directory import RunDirectory
from resilient_train.diagnose.frames import called_by_us, is_users
from resilient_train.ranks.watchdog import Hang, Phase
from resilient_train.ranks.world import World
from resilient_train.record import endings, notes
from resilient_train.wording import IN_FILE_ONLY, log

_LOADER = "torch/utils/data/dataloader.py"
_FOR_OTHERS_S = 1.2  # until the watchdogs of other ranks have looked at their clocks, too


def end_hung(
    hang: Hang, world: World, directory: RunDirectory, run: Run | None, asked_for_another: Callable[[], bool]
) -> int:
    """Log where a run hangs, save what can be saved, and return the exit code. Called in another thread.

    `asked_for_another` says whether a request to stop came because another process of the run failed.
    """
    asked = "it was asked to stop, and " if hang.stop_asked else ""
    where = next((f for f in reversed(called_by_us(hang.frames)) if is_users(f.f_code.co_filename)), None)
    place = f"{where.f_code.co_filename}:{where.f_lineno}, in {where.f_code.co_name}" if where else "no line of yours"
    for frame in hang.frames if where is None else ():  # user code may run in a worker of the data loader
        workers = getattr(frame.f_locals.get("self"), "_workers", [])
        if workers and frame.f_code.co_filename.endswith(_LOADER):
            pids = ", ".join(str(one.pid) for one in workers)
            place = f"no line of yours: it waits for a batch from the workers of the data loader (processes {pids})"
    evidence = f"{asked}no {hang.phase} was finished for {hang.seconds:.0f} s; it hangs in {place}"
    # Rank 0 reports for the ranks that only wait for another; a rank that hangs in user code reports itself.
    level = logging.ERROR if world.is_main or where else logging.INFO
    log.log(level, "%s: the process ends; all stacks are in %s", evidence, directory.log(world.rank))
    log.info("%s", hang.stacks, extra=IN_FILE_ONLY)
    if not hang.stop_asked:
        if world.size > 1:
            evidence = _with_others(notes.Hung(world.rank, evidence, where is not None), world, directory)
        if run is not None:
            run.guard.hung(evidence, in_update=hang.phase is Phase.STEP)
        return 1
    is_for_another = asked_for_another()  # reads files, so not before the stacks are logged
    if (why := endings.failure(directory.path) if is_for_another else None) is not None:
        log.error("error: %s", why)
    is_saved = _save_newest(world, run)
    if run is not None:
        run.guard.ended(was_killed=is_for_another and why is None)
    return 75 if is_saved and not is_for_another else 1  # 75: the same command resumes from what was written


def _with_others(mine: notes.Hung, world: World, directory: RunDirectory) -> str:
    """Let rank 0 report which rank hung where: the others wait for it, as it would only see that they ended."""
    if not world.is_main:
        with suppress(OSError):  # this host may not have the directory
            notes.leave(directory.path, mine)
        time.sleep(_FOR_OTHERS_S)
        return mine.evidence
    evidence = notes.who_hung(notes.gather_hung(directory.path, mine, world.size, _FOR_OTHERS_S), world.size)
    if evidence != mine.evidence:
        log.error("%s", evidence)
    return evidence


def _save_newest(world: World, run: Run | None) -> bool:
    """Let rank 0 write the newest verified state without waiting for the loop; False if that failed."""
    if not world.is_main:
        time.sleep(_FOR_OTHERS_S)  # rank 0 would fail when it loses this one
    if run is None or not world.is_main or not run.guard.clock.step:
        return True
    step, path = run.guard.leave_newest()
    if path is None:
        log.error("no newer state could be written: the run begins again at step %s", f"{step:,}")
    else:
        log.info("the state of step %s is in %s: the same command resumes from there", f"{step:,}", path)
    return path is not None
