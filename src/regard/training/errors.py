"""What can stop a run, apart from mistakes in the arguments (those are `regard.checks.ArgumentError`)."""

from __future__ import annotations


class TrainingStopped(RuntimeError):
    """The run cannot go on: a non-finite loss, a full disk. The message is one line that says what
    happened, where, and which checkpoint is the last good one. The command line exits with 1."""


class TrainingInterrupted(TrainingStopped):
    """The user (Ctrl-C) or the system (SIGTERM) ended the run. The command line exits with 130."""
