"""Trainers on `transformers.Trainer` with sealed checkpoints: `SealedTrainer` for data, `RegardTrainer` for text."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import nested_gather

from ..checks import ArgumentError, require
from ..models.base.base import tell_step
from ..nn.optimizer_groups import memory_parameters, optimizer_groups
from .callbacks import Clock
from .data.documents import StreamedWindows
from .device import finite_everywhere, is_sharded, main_process, shard, split_states, whole, whole_weights
from .errors import TrainingStopped
from .evaluation import Evaluation, Units, evaluate, row_means
from .muon import MuonAdamW
from .storage.checkpoints import last_good, sealing
from .storage.reproducer import NON_FINITE, first_non_finite, keep, non_finite_gradient
from .storage.resuming import put_weights


def quiet_arguments(folder: Path, device: torch.device, **settings: Any) -> TrainingArguments:
    """Return arguments for training on one device; nothing is shown, reported or saved unless `settings` ask for it."""
    common: dict[str, Any] = {
        "save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True,
        "remove_unused_columns": False, "dataloader_pin_memory": False, "use_cpu": device.type == "cpu",
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **{**common, **settings})
    arguments._n_gpu = min(1, arguments.n_gpu)  # Trainer would use nn.DataParallel
    return arguments


class SealedTrainer(Trainer):
    """Trainer that reads its data in order, gives memories a learning rate of their own, and seals its checkpoints, of
    which it keeps `keep`; it does not print logs. With `muon`, it uses `MuonAdamW`."""

    control: TrainerControl
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    regroups: ClassVar[bool] = False
    """Whether parameters are in the groups of `optimizer_groups` even without a memory and without Muon."""

    def __init__(self, *, keep: int, muon: bool = False, **kwargs: Any) -> None:
        self.keep, self.muon = keep, muon
        use_cache = getattr(kwargs["model"].config, "use_cache", True)
        super().__init__(**kwargs)
        self.remove_callback(PrinterCallback)
        self.model.config.use_cache = use_cache  # which Trainer sets to False, also in what is saved

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimiser, with memories in a group of their own; raise `ArgumentError` for sparse gradients."""
        network = self.model if model is None else model
        if self.optimizer is None and (self.regroups or self.muon or memory_parameters(network)[0]):
            groups = optimizer_groups(network, weight_decay=self.args.weight_decay)
            sparse = "a memory has sparse_grad=True, which this trainer does not support"
            hint = "omit it, or use your own training loop with torch.optim.SparseAdam"
            require(not groups.sparse, "train", f"{sparse}; {hint}.")
            if self.muon:
                self.optimizer = MuonAdamW.of(groups.dense, self.args.learning_rate, network)
            else:
                kind, settings = self.get_optimizer_cls_and_kwargs(self.args, network)
                self.optimizer = kind(groups.dense, **settings)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the learning rate schedule, which does not apply to groups with a fixed rate."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        for i, group in enumerate(scheduler.optimizer.param_groups):
            if group.get("fixed_rate"):
                scheduler.lr_lambdas[i] = lambda step: 1.0
                group["lr"] = scheduler.base_lrs[i]
        return scheduler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        put_weights(self.model if model is None else model, Path(resume_from_checkpoint), call="train")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        run, step, main = Path(self.args.output_dir), self.state.global_step, self.args.should_save
        with sealing(run / f"checkpoint-{step}", run, self.keep, main=main):
            super()._save_checkpoint(*args, **kwargs)
            if isinstance(self.train_dataset, StreamedWindows) and main:
                self.train_dataset.save(run / f"checkpoint-{step}", step)
            self.accelerator.wait_for_everyone()


class RegardTrainer(SealedTrainer):
    """Trainer of language models on a text, with strided evaluation, more logs, and a stop at non-finite numbers.

    Args:
        held_out: held-out tokens that are evaluated during training.
        train_units, held_out_units: sizes of the two texts, for bits.
        context, eval_batch: tokens per window, and windows per evaluation batch.
        shard: whether the processes of the run share out the model (`device`); whole tensors are saved.
        **kwargs: arguments of `SealedTrainer`.
    """

    def __init__(
        self,
        *,
        held_out: Tensor,
        train_units: Units,
        held_out_units: Units,
        context: int,
        eval_batch: int,
        shard: bool = False,
        **kwargs: Any,
    ) -> None:
        self.held_out, self.context, self.eval_batch, self.shard = held_out, context, eval_batch, shard
        self.train_units, self.held_out_units = train_units, held_out_units
        self.clock = Clock()
        self.since_log = {"loss": 0.0, "step": 0}
        super().__init__(**kwargs)
        for callback in (self.clock, SinceLog(self)):
            self.add_callback(callback)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens per optimiser step, over all devices and micro-batches."""
        args = self.args
        return args.train_batch_size * args.gradient_accumulation_steps * args.world_size * self.context

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimiser; with `shard`, split the model first when training begins."""
        if self.shard and self.is_in_train and not is_sharded(self.model):
            shard(self.model)  # which holds the weights of a checkpoint by now
            self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)  # autocast
            self.model._is_accelerate_prepared = True  # accelerate leaves it as it is
            self.optimizer = None  # of the check of a checkpoint, for the whole parameters
        return super().create_optimizer(model)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Evaluate on the first `eval_tokens` held-out tokens, and log the results with the prefix `eval_`."""
        results = vars(self.measure(self.held_out)).items()
        metrics = {f"eval_{key}": value for key, value in results if value is not None}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure(self, tokens: Tensor) -> Evaluation:
        """Return the evaluation of the current weights on some tokens of the held-out text."""
        return evaluate(self.model, tokens, self.held_out_units, context=self.context, batch=self.eval_batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add bits, tokens per second and means of the diagnostics to a training log, then log it."""
        if "loss" in logs:
            steps, seconds = self.clock.lap()
            per_step = self.tokens_per_step
            logs["bits_per_char"] = self.train_units.bits_per_char(logs["loss"])
            logs["bits_per_byte"] = self.train_units.bits_per_byte(logs["loss"])
            logs["tokens"] = self.state.global_step * per_step
            logs["tokens_per_second"] = steps * per_step / max(seconds, 1e-9)
            window = self.held_out[: self.context].long().to(self.args.device)
            logs.update(row_means(self.model, window[None]))
        super().log(logs, start_time)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss; raise `TrainingStopped`, naming step and first non-finite tensor, if it is not finite."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not (finite_everywhere(loss) if is_sharded(self.model) else torch.isfinite(loss)):
            with self.compute_loss_context_manager():
                culprit = first_non_finite(self.model, {**inputs, "use_cache": False})
            raise TrainingStopped(self._stopped(f"the loss is {loss.item()}", culprit, inputs))
        return loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of one micro-batch; raise `TrainingStopped` before the step if one is not finite."""
        tell_step(self.model, self.state.global_step)
        loss = super().training_step(model, inputs, *args, **kwargs)
        culprit = non_finite_gradient(self.model)
        if culprit is not None:
            raise TrainingStopped(self._stopped("the gradient is not finite", culprit, inputs))
        return loss

    def _stopped(self, what: str, culprit: str, inputs: dict[str, Any]) -> str:
        run = Path(self.args.output_dir)
        folder = run / (NON_FINITE if main_process() else f"{NON_FINITE}-{self.args.process_index}")
        hint = keep(folder, self.model, inputs, whole_weights(self.model))
        when = f"{what} at step {self.state.global_step + 1}; first non-finite tensor: {culprit}"
        return f"{when}; {hint}{last_good(run)}"

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, whole tensors if it is sharded."""
        weights = whole_weights(self.model)
        if weights is None:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            return super()._save_optimizer_and_scheduler(output_dir)
        assert self.optimizer is not None
        state = whole(self.optimizer.state_dict())
        if self.args.should_save:
            torch.save(state, Path(output_dir) / "optimizer.pt")
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if is_sharded(self.model):
            assert self.optimizer is not None
            split_states(self.optimizer)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        loss = nested_gather(self._tr_loss, self.args.parallel_mode).mean().item()
        self.since_log = {"loss": loss, "step": self._globalstep_last_logged}
        super()._save_checkpoint(*args, **kwargs)


class SinceLog(TrainerCallback, ExportableState):
    """Save the loss since the last log in every checkpoint, so that a resumed run logs the same mean."""

    def __init__(self, trainer: RegardTrainer) -> None:
        self.trainer = trainer

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self.trainer.since_log}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved = state.stateful_callbacks.get("SinceLog")
        if not state.global_step or saved is None:  # a new run, or a checkpoint of an earlier version
            return
        try:
            loss, step = float(saved["attributes"]["loss"]), int(saved["attributes"]["step"])
        except (KeyError, TypeError, ValueError, OverflowError):
            loss, step = -1.0, -1
        if not (0 <= loss < float("inf") and 0 <= step <= state.global_step):
            raise ArgumentError(f"train: the checkpoint of step {state.global_step} holds a damaged SinceLog: {saved}.")
        self.trainer._tr_loss.fill_(loss)
        self.trainer._globalstep_last_logged = step
