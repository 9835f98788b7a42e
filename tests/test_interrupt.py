"""Ctrl-C ends a run, also where Python swallows it."""

from __future__ import annotations

import signal

import pytest

from resilient_train.ranks.interrupt import Interrupt


class Finalized:
    """Something whose end a signal interrupts."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_finalizer_swallows_is_raised_at_the_next_check() -> None:
    """Nothing gets lost, and afterwards Ctrl-C means what it meant before."""
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        interrupt.check()
        thing = Finalized()
        del thing
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    assert signal.getsignal(signal.SIGINT) is before


def test_it_is_raised_at_once_elsewhere() -> None:
    """As without it."""
    with Interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
