"""Training and scoring of language models on tasks (`regard.tasks`)."""

from .scores import TaskScore, score_task
from .training import TaskBudget, TaskExamples, TaskProgress, train_on_task

__all__ = ["TaskBudget", "TaskExamples", "TaskProgress", "TaskScore", "score_task", "train_on_task"]
