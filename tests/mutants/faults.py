"""Faults as a careless colleague would write them, to see which of them the tests find.

Each was chosen by reading the source alone, and changes what a user sees: a number, a file, a message, an exit code.
`tests/mutants/run.py` plants them one by one in copies of the source.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of the source that nobody wants."""

    topic: str
    name: str
    """What is wrong then, as a part of a sentence."""
    file: str
    """Below src/isoscale."""
    old: str
    """Occurs exactly once in the file."""
    new: str


FAULTS = [
    # ------------------------------------------------------------------------------------------ electronic structure
    Fault(
        "electronic structure",
        "the Fermi level does not move with the density of states where it is differentiated",
        "science/electronic/states.py",
        "return fill(dos, fermi + move, quadrature)",
        "return fill(dos, fermi + move.detach(), quadrature)",
    ),
    Fault(
        "electronic structure",
        "the band energy of fully occupied intervals is integrated with a wrong factor",
        "science/electronic/integrals.py",
        "rising_energy = self._left * rising + length**3 / (3 * self._spacing)",
        "rising_energy = self._left * rising + length**3 / (2 * self._spacing)",
    ),
    Fault(
        "electronic structure",
        "the entropy counts electrons and forgets holes",
        "science/electronic/integrals.py",
        "return occupation * logarithm(-x) + (1 - occupation) * logarithm(x)",
        "return occupation * logarithm(-x)",
    ),
    Fault(
        "electronic structure",
        "the cell of Quantum ESPRESSO stays in bohr",
        "science/electronic/calculation.py",
        "for axis in axes]) * length * BOHR",
        "for axis in axes]) * length",
    ),
    Fault(
        "electronic structure",
        "the first point of a snapshot belongs to the snapshot before it",
        "science/electronic/snapshot_source.py",
        "self.ends.to(samples.device), right=True)",
        "self.ends.to(samples.device), right=False)",
    ),
    Fault(
        "electronic structure",
        "coordinates of points are taken for descriptors, and the first descriptors for coordinates",
        "science/electronic/mala/translation.py",
        '"3:" if contain_xyz else None',
        'None if contain_xyz else "3:"',
    ),
    # ---------------------------------------------------------------------------------------------------- potentials
    Fault(
        "potentials",
        "virtual atoms have the energy of lone atoms",
        "science/potentials/model.py",
        'energies = (energies.to(bias.dtype) + bias) * batch["is_atom"]',
        "energies = energies.to(bias.dtype) + bias",
    ),
    Fault(
        "potentials",
        "forces forget what pulls at an atom through its neighbours' edges",
        "science/potentials/geometry.py",
        "return (slopes - back.view_as(slopes)).sum(2)",
        "return slopes.sum(2)",
    ),
    Fault(
        "potentials",
        "virials have the wrong sign",
        "science/potentials/geometry.py",
        "return -(vectors.transpose(2, 3) @ slopes.to(vectors.dtype)).sum(1)",
        "return (vectors.transpose(2, 3) @ slopes.to(vectors.dtype)).sum(1)",
    ),
    Fault(
        "potentials",
        "the slope of the switching function forgets where neighbours begin to fade",
        "science/potentials/se_e2_a.py",
        "(u * (1 - u)).square() * (-30 / (cutoff - smooth))",
        "(u * (1 - u)).square() * (-30 / cutoff)",
    ),
    Fault(
        "potentials",
        "a list of neighbours serves until an atom has moved the whole skin",
        "science/atoms/neighbour_lists.py",
        "max(initial=0.0) <= (self._skin / 2) ** 2)",
        "max(initial=0.0) <= self._skin**2)",
    ),
    Fault(
        "potentials",
        "the type map of a system is read and not used",
        "science/potentials/systems.py",
        "return np.array([types.index(name) if name in types else VIRTUAL for name in self.type_names], np.int64)",
        "return np.array([n if name in types else VIRTUAL for n, name in enumerate(self.type_names)], np.int64)",
    ),
    Fault(
        "potentials",
        "the spread of directions takes three components for one",
        "science/potentials/se_e2_a.py",
        "(directions / count / 3).sqrt()",
        "(directions / count).sqrt()",
    ),
    # ------------------------------------------------------------------------------------------------------- metrics
    Fault(
        "metrics",
        "the mean of a window is divided by the weight of all of the epoch",
        "engine/metrics/accumulators.py",
        "found[name] = (total - earlier_total) / (weight - earlier_weight)",
        "found[name] = (total - earlier_total) / weight",
    ),
    Fault(
        "metrics",
        "torchmetrics count on from one epoch into the next",
        "engine/step/context.py",
        "            metrics.reset(metric)\n",
        "            metric._computed = None\n",
    ),
    Fault(
        "metrics",
        "errors of snapshots with opposite signs cancel in their mean",
        "science/electronic/physics.py",
        "float(values[self._knowable[metric]].abs().mean())",
        "float(values[self._knowable[metric]].mean())",
    ),
    # -------------------------------------------------------------------------------------------------------- losses
    Fault(
        "losses",
        "labels that are ignored weigh like the first class",
        "engine/metrics/losses.py",
        "torch.where(labels == IGNORED, 0, weights).sum()",
        "weights.sum()",
    ),
    Fault(
        "losses",
        "the loss of forces is a mean over atoms and not over components",
        "science/potentials/task.py",
        "Errors(entries, share / 3, 3 * num_atoms, 1.0, 3 * count.sum())",
        "Errors(entries, share, num_atoms, 1.0, 3 * count.sum())",
    ),
    Fault(
        "losses",
        "the weight of a term goes from its end to its start as the learning rate falls",
        "engine/optim/loss_weights.py",
        "return WeightCurve(lambda step: end + (start - end) * rate(step) / rate.peak)",
        "return WeightCurve(lambda step: start + (end - start) * rate(step) / rate.peak)",
    ),
    # ------------------------------------------------------------------------------------------------------ clipping
    Fault(
        "clipping",
        "gradients are clipped while they are still scaled",
        "engine/step/step.py",
        "self.scaler is not None and self.clip is not None and self.gradients",
        "self.scaler is not None and self.clip is None and self.gradients",
    ),
    Fault(
        "clipping",
        "every parameter is clipped by itself and not by the norm of all",
        "engine/step/step.py",
        "            nn.utils.clip_grad_norm_(self.parameters, self.clip, error_if_nonfinite=False, foreach=True)\n",
        "            for parameter in self.parameters:\n"
        "                nn.utils.clip_grad_norm_([parameter], self.clip, error_if_nonfinite=False, foreach=True)\n",
    ),
    Fault(
        "clipping",
        "a LightningModule that names no algorithm is clipped by value",
        "engine/lightning/module.py",
        'nn.utils.clip_grad_value_ if gradient_clip_algorithm == "value" else nn.utils.clip_grad_norm_',
        'nn.utils.clip_grad_norm_ if gradient_clip_algorithm == "norm" else nn.utils.clip_grad_value_',
    ),
    # ----------------------------------------------------------------------------------------------------- schedules
    Fault(
        "schedules",
        "cosine and linear schedules do not quite arrive at their end",
        "engine/optim/schedules.py",
        "part = min(1.0, since / max(1, self.num_steps - first - 1))",
        "part = min(1.0, since / max(1, self.num_steps - first))",
    ),
    Fault(
        "schedules",
        "plateau loses its patience an evaluation too early",
        "engine/optim/schedules.py",
        "if self._stalled <= self.section.patience:",
        "if self._stalled < self.section.patience:",
    ),
    Fault(
        "schedules",
        "an exponential decay without gamma does not leave out the warm-up",
        "engine/optim/schedules.py",
        "(every / (self.num_steps - self.num_warmup))",
        "(every / self.num_steps)",
    ),
    # ---------------------------------------------------------------------------------------------------- optimizers
    Fault(
        "optimizers",
        "lr_scale of a group is forgotten as soon as the schedule sets the rate",
        "engine/optim/optimizers.py",
        'group["lr"] = lr * group["lr_scale"] if "lr_scale" in group else lr',
        'group["lr"] = lr',
    ),
    Fault(
        "optimizers",
        "steps that Adam leaves out count for its bias correction",
        "engine/optim/fused_adam.py",
        "            torch._foreach_sub_(self._counters, [found_inf] * len(self._counters))\n",
        "            pass\n",
    ),
    # -------------------------------------------------------------------------------------------------- sample order
    Fault(
        "sample order",
        "every epoch has the same order",
        "data/order.py",
        "return [fold(key, epoch) for key in self._keys]",
        "return [fold(key, 0 * epoch) for key in self._keys]",
    ),
    Fault(
        "sample order",
        "an epoch begins where the full batches of the one before would end",
        "data/batches.py",
        "return epoch * self.num_samples + within * self.batch_size",
        "return step * self.batch_size",
    ),
    Fault(
        "sample order",
        "what comes behind the shorter block of a window is not moved up",
        "data/window_order.py",
        "start + mixed >= (last + 1) * self.samples_per_block - self._lacking)",
        "start + mixed >= (last + 1) * self.samples_per_block)",
    ),
    Fault(
        "sample order",
        "the batch of a step counts as taken before it is taken",
        "data/mixture.py",
        "self._counted(self._drawn(number)[: step % _BLOCK])",
        "self._counted(self._drawn(number)[: step % _BLOCK + 1])",
    ),
    # --------------------------------------------------------------------------------------- reduction across ranks
    Fault(
        "reduction across ranks",
        "the variance of a batch norm forgets how far apart the means of ranks are",
        "parallel/batch_norm.py",
        "variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total",
        "variance = (variances * counts).sum(0) / total",
    ),
    Fault(
        "reduction across ranks",
        "shards are added one after the other and not in a tree",
        "parallel/reduction.py",
        "return (left ^ right).bit_length()",
        "return (right - left).bit_length()",
    ),
    Fault(
        "reduction across ranks",
        "the confusion matrix is that of one rank's samples",
        "engine/evaluation.py",
        '        ranks.all_reduce(counts, "the counts of an evaluation")\n',
        '        ranks.all_reduce(counts.clone(), "the counts of an evaluation")\n',
    ),
    Fault(
        "reduction across ranks",
        "under manual optimisation every rank counts the same, however many samples it has",
        "engine/lightning/manual_optimization.py",
        "self.weight = self._plan.share(size).count / size",
        "self.weight = 1 / self._ranks.world_size",
    ),
    # -------------------------------------------------------------------------------------------------- accumulation
    Fault(
        "accumulation",
        "the loss of a part is not weighted by its samples",
        "engine/metrics/losses.py",
        "return WeightedSum.of_mean(value.reshape(()) if value.dim() else value, count)",
        "return WeightedSum.of_mean(value.reshape(()) if value.dim() else value, 1)",
    ),
    Fault(
        "accumulation",
        "gradients are divided by the weight of the last part alone",
        "engine/step/step.py",
        "totals[index] = totals[index] + amount",
        "totals[index] = amount",
    ),
    # ---------------------------------------------------------------------------------------------------- checkpoint
    Fault(
        "checkpoint",
        "the bytes of a file are counted and not compared with their hash",
        "engine/state/checkpoint.py",
        '    if _sha256(path) != expected.get("sha256"):\n'
        '        raise CheckpointError(f"{path} is not what was written: its sha256 differs")\n',
        "",
    ),
    Fault(
        "checkpoint",
        "one that lost its name to a writer that was killed is not put back before the newest is read",
        "engine/state/checkpoint.py",
        "        self._put_back()\n        for path in self.all():\n",
        "        for path in self.all():\n",
    ),
    Fault(
        "checkpoint",
        "one more than asked for is kept",
        "engine/state/checkpoint.py",
        "if path.name <= newest.name][self.keep :]:",
        "if path.name < newest.name][self.keep :]:",
    ),
    Fault(
        "checkpoint",
        "the best one is dropped when it is old",
        "engine/state/checkpoint.py",
        'spared = {self.pointed("best"), self.pointed("last")}',
        'spared = {self.pointed("last")}',
    ),
    Fault(
        "checkpoint",
        "the hash of averaged weights is that of the weights that were not averaged",
        "engine/state/checkpoint.py",
        'return {**tensors.get(MODEL, {}), **tensors.get("average", {})}',
        'return {**tensors.get("average", {}), **tensors.get(MODEL, {})}',
    ),
    # -------------------------------------------------------------------------------------------------------- resume
    Fault(
        "resume",
        "the first window after a restart is a mean over the epoch so far",
        "engine/metrics/windows.py",
        'self._before = {name: (pair[0], pair[1]) for name, pair in values["before"].items()}',
        "self._before = {}",
    ),
    Fault(
        "resume",
        "an evaluation that was done before the stop is done again",
        "engine/trainer.py",
        "if is_over and progress.evaluated_at != progress.step:",
        "if is_over:",
    ),
    Fault(
        "resume",
        "the best value so far is forgotten",
        "engine/metrics/monitors.py",
        '            self.value, self.step = values["value"], values["step"]\n',
        '            self.step = values["step"]\n',
    ),
    # ---------------------------------------------------------------------------------------- modes and extra state
    Fault(
        "modes and extra state",
        "an evaluation puts modules that were in eval mode into training mode",
        "engine/step/context.py",
        "            for module, mode in modes:\n                module.training = mode\n",
        "            for module, _ in modes:\n                module.training = True\n",
    ),
    Fault(
        "modes and extra state",
        "parameters that were unfrozen in training are frozen again after a restart",
        "engine/state/module_state.py",
        '_set_trainable(task, {**start.trainable, **values.get("trainable", {})})',
        "_set_trainable(task, start.trainable)",
    ),
    Fault(
        "modes and extra state",
        "numpy's generator does not go on where it was before a restart",
        "engine/state/module_state.py",
        '            np.random.set_state(("MT19937", np.array(key, np.uint32), *rest))\n',
        "",
    ),
    # ----------------------------------------------------------------------------------- evaluation and best weights
    Fault(
        "evaluation and best weights",
        "a first evaluation of NaN is the best for ever",
        "engine/metrics/monitors.py",
        "if value is None or math.isnan(value) or not self._better(value):",
        "if value is None or not self._better(value):",
    ),
    Fault(
        "evaluation and best weights",
        "evaluations measure the weights and not their averages",
        "engine/evaluation.py",
        "with self.parts.ema.swapped_in() if self.parts.ema else nullcontext():",
        "with nullcontext():",
    ),
    Fault(
        "evaluation and best weights",
        "a run is tested with its last weights and not with the best",
        "runs/run.py",
        'return checkpoints.pointed("best") or checkpoints.find("last")',
        'return checkpoints.pointed("last") or checkpoints.find("best")',
    ),
    # ------------------------------------------------------------------------------------------------ early stopping
    Fault(
        "early stopping",
        "min_delta counts for nothing",
        "engine/metrics/monitors.py",
        "value < self._best - self._section.min_delta",
        "value < self._best",
    ),
    Fault(
        "early stopping",
        "it waits for an evaluation more than its patience",
        "engine/metrics/monitors.py",
        "return self._stalled >= self._section.patience",
        "return self._stalled > self._section.patience",
    ),
    # ----------------------------------------------------------------------------------------- precision and scaling
    Fault(
        "precision",
        "coordinates and energies of atoms are rounded to single precision",
        "engine/step/step.py",
        "value.dtype != dtype and key not in as_stored:",
        "value.dtype != dtype:",
    ),
    Fault(
        "precision",
        "the loss of a batch that is computed at once is not scaled in fp16",
        "engine/step/step.py",
        "self._differentiate(self._scaled(loss))",
        "self._differentiate(loss)",
    ),
    Fault(
        "precision",
        "double precision stays the default of the process after a training",
        "engine/precision.py",
        "            torch.set_default_dtype(before[1])\n",
        "",
    ),
    # ----------------------------------------------------------------------------------------------- scaling of data
    Fault(
        "scaling of data",
        "the deviation forgets how far apart the means of blocks are",
        "data/transforms.py",
        "self._square = self._square + square + apart.square() * (self._count * count / total)",
        "self._square = self._square + square",
    ),
    Fault(
        "scaling of data",
        "transforms of the target are undone in the order in which they were done",
        "engine/target_units.py",
        "for transform in reversed(self._undone):",
        "for transform in self._undone:",
    ),
    # -------------------------------------------------------------------------------------------------- data formats
    Fault(
        "data formats",
        "rows of a chunked HDF5 file come sorted and not as they were asked for",
        "data/formats/hdf5.py",
        "return found[places]",
        "return found[np.sort(places)]",
    ),
    Fault(
        "data formats",
        "the row behind one that is left out is the one that is left out",
        "data/formats/views.py",
        'return rows + np.searchsorted(self._kept_before, rows, "right")',
        'return rows + np.searchsorted(self._kept_before, rows, "left")',
    ),
    Fault(
        "data formats",
        "every n-th row is read as the rows one after the other",
        "data/formats/views.py",
        "return self._rows.start + self._rows.step * rows",
        "return self._rows.start + rows",
    ),
    # ------------------------------------------------------------------------------------- augmentation and dropout
    Fault(
        "augmentation and dropout",
        "crops move along the diagonal only",
        "science/images/augment.py",
        "self._places(shifts[:, side], images.shape[2 + side])",
        "self._places(shifts[:, 0], images.shape[2 + side])",
    ),
    Fault(
        "augmentation and dropout",
        "a dataset that draws random numbers draws the same ones in every epoch",
        "data/samples.py",
        "fold(fold(self._keys, epochs.numpy()), indices.numpy())",
        "fold(fold(self._keys, 0 * epochs.numpy()), indices.numpy())",
    ),
    Fault(
        "augmentation and dropout",
        "a sample that is the first of all to draw gets numbers that follow from no seed",
        "data/samples.py",
        "            if watch.drawn <= self._drawn:\n                return batch",
        "            if True:\n                return batch",
    ),
    Fault(
        "augmentation and dropout",
        "reading a dataset moves the generators of the training process",
        "data/generators.py",
        "if self._undo:",
        "if False:",
    ),
    Fault(
        "augmentation and dropout",
        "masks on the CPU are the same in every step",
        "data/rng.py",
        "pairs = [[fold(key, self.step) for key in _keys(self.seed, purpose)] for purpose in self._rows]",
        "pairs = [[fold(key, 0) for key in _keys(self.seed, purpose)] for purpose in self._rows]",
    ),
    # -------------------------------------------------------------------------------------- stopping and exit codes
    Fault(
        "stopping and exit codes",
        "a deadline leaves no time for the last checkpoint",
        "engine/stopping.py",
        "time.time() > self._deadline - _MARGIN - 2 * self._longest_save:",
        "time.time() > self._deadline:",
    ),
    Fault(
        "stopping and exit codes",
        "a second Ctrl-C is passed over",
        "engine/stopping.py",
        '        if meaning == "now":\n            shout(',
        '        if meaning == "again":\n            shout(',
    ),
    Fault(
        "stopping and exit codes",
        "a full disk ends with the exit code of a fault in the program",
        "errors.py",
        "can_be_fixed = isinstance(error, UserError) or is_full_disk(error) or _is_long_name(error)",
        "can_be_fixed = isinstance(error, UserError) or _is_long_name(error)",
    ),
    Fault(
        "stopping and exit codes",
        "ranks that stopped on request end as if they had failed",
        "launch/local.py",
        "return DONE if not any(codes) else START_AGAIN if START_AGAIN in codes else FAILED",
        "return FAILED if any(codes) else DONE",
    ),
    # -------------------------------------------------------------------------------------------------- command line
    Fault(
        "command line",
        "a sweep with points that failed ends with 0",
        "cli/studies/sweep.py",
        "raise typer.Exit(EXIT_FAILED)",
        "raise typer.Exit()",
    ),
    Fault(
        "command line",
        "the command to train longer doubles the limit that did not end the run",
        "runs/summary.py",
        "section.steps <= section.epochs * per_epoch)",
        "section.steps > section.epochs * per_epoch)",
    ),
    Fault(
        "command line",
        "the command to go on starts one rank where there were several",
        "runs/summary.py",
        'else f"isoscale train --run {shlex.quote(path)}{_devices(run)}"',
        'else f"isoscale train --run {shlex.quote(path)}"',
    ),
    # -------------------------------------------------------------------------------------------------------- recipe
    Fault(
        "recipe",
        "of several recipes that are extended the first one wins",
        "recipe/load.py",
        "base = read if base is None else merge(base, read)",
        "base = read if base is None else merge(read, base)",
    ),
    Fault(
        "recipe",
        "a run is continued with another schedule, without a word",
        "recipe/compare.py",
        '    ("observe",),\n    ("launch",),\n',
        '    ("observe",),\n    ("schedule",),\n    ("launch",),\n',
    ),
    Fault(
        "recipe",
        "minutes and seconds of a time limit are read as hours and minutes",
        "recipe/launch.py",
        "[[0, *parts, 0], [0, *parts], parts]",
        "[[0, *parts, 0], [*parts, 0], parts]",
    ),
    Fault(
        "recipe",
        "the batch of a DeePMD input is not multiplied by the number of ranks",
        "science/potentials/deepmd/translation.py",
        "_times(mixed or given, self._world), words=words)",
        "mixed or given, words=words)",
    ),
    # ----------------------------------------------------------------------------------------------------- observers
    Fault(
        "observers",
        "metrics.jsonl keeps values that a continued run logs again",
        "observe/metric_log.py",
        "_whole_lines(self._path) if start_bytes is None else start_bytes)",
        "_whole_lines(self._path))",
    ),
    Fault(
        "observers",
        "the values of a checkpoint's own step are dropped from TensorBoard",
        "runs/outputs.py",
        "directory.tensorboard, step + 1, section.tensorboard,",
        "directory.tensorboard, step, section.tensorboard,",
    ),
    Fault(
        "observers",
        "the learning rate that is logged is that of the next step",
        "engine/trainer.py",
        '{"lr": self.parts.rate(step - 1)}',
        '{"lr": self.parts.rate(step)}',
    ),
    # -------------------------------------------------------------------------------------------- export and predict
    Fault(
        "export and predict",
        "a network that is taken from a run is in training mode",
        "runs/run.py",
        "self._data, trust=self._trust).live_task(checkpoint).eval()",
        "self._data, trust=self._trust).live_task(checkpoint)",
    ),
    Fault(
        "export and predict",
        "predictions are in the units that the network learns",
        "runs/inference.py",
        'else {"prediction": application.stored(output)}',
        'else {"prediction": output}',
    ),
    Fault(
        "export and predict",
        "an exported potential forgets the slots that no neighbour takes",
        "science/potentials/deploy.py",
        "sums.append(torch.bmm(own.transpose(1, 2), shapes[-1]) + absent)",
        "sums.append(torch.bmm(own.transpose(1, 2), shapes[-1]))",
    ),
    # -------------------------------------------------------------------------------------------------------- launch
    Fault(
        "launch",
        "the tasks of the Slurm job count and not those of the step",
        "parallel/environments/schedulers.py",
        'variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or "1"',
        'variables.get("SLURM_NTASKS") or variables.get("SLURM_STEP_NUM_TASKS") or "1"',
    ),
    Fault(
        "launch",
        "hosts of a Slurm list lose the zeros in front of their numbers",
        "parallel/environments/schedulers.py",
        'yield from (f"{value:0{len(first)}d}" for value in range(int(first), int(last) + 1))',
        "yield from (str(value) for value in range(int(first), int(last) + 1))",
    ),
    Fault(
        "launch",
        "every rank of --devices is the first one of its machine",
        "launch/local.py",
        '"LOCAL_RANK": str(rank)',
        '"LOCAL_RANK": "0"',
    ),
    Fault(
        "launch",
        "ranks that torchrun starts again meet under the names of the start before",
        "parallel/environments/find.py",
        'attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")',
        'attempt = variables.get("TORCHELASTIC_MAX_RESTARTS", "0")',
    ),
    Fault(
        "launch",
        "long jobs are told to save after three quarters of their time",
        "launch/config.py",
        "return NOTICE if limit is None else min(NOTICE, limit // 4)",
        "return NOTICE if limit is None else max(NOTICE, limit // 4)",
    ),
    # --------------------------------------------------------------------------------------------------------- study
    Fault(
        "study",
        "runs race to what the best of them managed, where the others never get",
        "study/compare.py",
        "Target(name, min(bests) if larger else max(bests), larger)",
        "Target(name, max(bests) if larger else min(bests), larger)",
    ),
    Fault(
        "study",
        "the best point of a sweep is that with the smallest value, also where larger is better",
        "study/sweep/states.py",
        "sign = -1 if sweep.larger_is_better else 1",
        "sign = 1",
    ),
    Fault(
        "study",
        "the speed of a run is the mean of its rates and not of its times",
        "study/facts.py",
        "return steps / sum(width / rate for width, rate in windows if rate > 0)",
        "return sum(width * rate for width, rate in windows if rate > 0) / steps",
    ),
    # ---------------------------------------------------------------------------------------- activation checkpointing
    Fault(
        "activation checkpointing",
        "batch norms count a batch twice where they are computed again",
        "engine/step/recompute.py",
        "isinstance(module, _NormBase) or _is_small(each)",
        "False",
    ),
    Fault(
        "activation checkpointing",
        "dropout draws other numbers when it is computed again",
        "engine/step/recompute.py",
        "undo.enter_context(self._random.repeated(self._position))",
        "pass",
    ),
    Fault(
        "activation checkpointing",
        "what a module logs is logged once more in the backward pass",
        "engine/step/context.py",
        "if not is_running():",
        "if True:",
    ),
    Fault(
        "activation checkpointing",
        "the forward pass that measures keeps what it is to save",
        "engine/step/activations.py",
        "return tensor.detach() if self._keeps else None",
        "return tensor.detach()",
    ),
]
