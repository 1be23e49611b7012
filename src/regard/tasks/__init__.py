"""Synthetic tasks: data generators, each with an error measure and a solver that knows how the data were made.

An example is a function of (seed, index), and of the split where a task has splits, so that it can be generated alone
or in a batch, and a resumed run sees the same data. A task is a frozen dataclass of settings, with one file and one
registration. Settings that are out of range or do not fit together raise `ArgumentError`.
"""

from .base import Task, tasks
from .cone_regression import ConeExamples, ConeRegression
from .copying import Reverse, Sort
from .cross_document_recall import CrossDocumentRecall, RecallExamples
from .in_context_regression import InContextRegression, RegressionPrompts
from .mqar import MQAR, StackedMQAR
from .mqmtar import MQMTAR
from .needle import NeedleExample, NeedleInHaystack, NeedleResult, NeedleScore, Share
from .permutation_tracking import PermutationTracking
from .recurring_names import RecurringNames
from .regbench import AutomatonExample, RegBench
from .stories import Stories, judge
from .text_windows import Text
from .tiny_math import TinyMath
from .tokens import IGNORED, SPLITS, TokenExample, TokenTask, Words, collate

__all__ = [
    "IGNORED", "MQAR", "MQMTAR", "SPLITS", "AutomatonExample", "ConeExamples", "ConeRegression", "CrossDocumentRecall",
    "InContextRegression", "NeedleExample", "NeedleInHaystack", "NeedleResult", "NeedleScore", "PermutationTracking",
    "RecallExamples", "RecurringNames", "RegBench", "RegressionPrompts", "Reverse", "Share", "Sort", "StackedMQAR",
    "Stories", "Task", "Text", "TinyMath", "TokenExample", "TokenTask", "Words", "collate", "judge", "tasks",
]  # fmt: skip
