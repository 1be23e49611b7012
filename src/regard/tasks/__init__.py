"""Tasks: generators of data, each with its metric and a solver that knows how the data were made.

A task is a function of (seed, index): any example can be made again, alone or in a batch, and a run that is taken up
again sees the same data. One file and one registration each; a task is a frozen dataclass of settings.
"""

from .base import Task, tasks
from .cone_regression import ConeExamples, ConeRegression
from .cross_document_recall import CrossDocumentRecall, RecallExamples
from .needle import NeedleExample, NeedleInHaystack, NeedleResult, NeedleScore, Share, wilson

__all__ = [
    "ConeExamples",
    "ConeRegression",
    "CrossDocumentRecall",
    "NeedleExample",
    "NeedleInHaystack",
    "NeedleResult",
    "NeedleScore",
    "RecallExamples",
    "Share",
    "Task",
    "tasks",
    "wilson",
]
