"""What each cause means and what helps against it, in words for a console; remedies are in the order to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from surefoot.records import Cause


@dataclass(frozen=True, slots=True)
class CauseText:
    """The text about one cause."""

    sentence: str
    """What it means."""
    remedies: tuple[str, ...]
    """What to do, in the order to try."""


# The same advice has the same text everywhere, so that it appears once when two causes are shown together.
LOWER = "Lower the learning rate: half of it is a good first try."
CLIP = "Clip by global norm, after unscaling and before the step, at 2-3x the normal maximum norm."
BFLOAT16 = "Train in bfloat16, which has the range of float32."
GO_BACK = "Resume from the last good checkpoint with half the learning rate."
PAST_IT = "Resume from the last good checkpoint and go on past the bad data."
EPSILON = "Put an epsilon of 1e-8 inside every log and division, in float32: float16 rounds it to 0."
SOFTMAX = "Compute softmax with the maximum subtracted, as torch.softmax and log_softmax do."
WARMUP = "Warm the learning rate up from zero over more steps."
RESET = "Reset the optimizer's state and warm the learning rate up again."
SHUFFLE = "Shuffle across all shards so that batches are more alike."

_TABLE: Mapping[Cause, tuple[str, ...]] = {
    Cause.BAD_BATCH: (
        "A batch was far outside what the run had seen before.",
        PAST_IT,
        "Find the sample in that batch: a wrong label, a wrong unit, an empty or a broken record.",
        "Check the shard it came from if it happens again every epoch or every shard.",
        CLIP,
    ),
    Cause.INPUT_SCALE: (
        "Inputs are not normalised, or no longer in the same way.",
        "Normalise images: the model expects values in [-1, 1] or [0, 1], not 0 to 255.",
        "Remove images that are all black or all white.",
        "Compare mean and standard deviation of the inputs with those from the start of the run.",
    ),
    Cause.LABELS: (
        "Labels do not match their inputs.",
        "Look at the samples with the highest loss and check their labels by hand.",
        "Check that labels are shifted by exactly one token, and that padding is left out of the loss.",
        "Check that classes are numbered from 0 and in the same order everywhere.",
    ),
    Cause.DRIFT: (
        "The data has drifted away from what the model was trained on so far.",
        "Compare the statistics of the latest data with the earliest, shard by shard.",
        SHUFFLE,
        "Normalise every data source in the same way.",
    ),
    Cause.LEARNING_RATE: (
        "The learning rate is too high for this model.",
        LOWER,
        CLIP,
        WARMUP,
    ),
    Cause.SCHEDULE: (
        "The schedule sets a wrong learning rate for this part of the run.",
        "Plot the learning rate over all steps and compare it with the intended one.",
        "Check that the schedule counts updates, not micro-batches or epochs, also after a resume.",
        WARMUP,
    ),
    Cause.MOMENTUM: (
        "Momentum is too high: old gradients keep pushing the weights.",
        "Lower momentum, or the first beta: 0.9 is usual.",
        RESET,
        LOWER,
    ),
    Cause.ACCUMULATION: (
        "Gradients of several micro-batches add up where they should be averaged.",
        "Divide the loss by the number of accumulation steps.",
        "Check that gradients are zeroed after every update, and only then.",
        "Use fewer accumulation steps.",
    ),
    Cause.PRECISION_OVERFLOW: (
        "Values grew beyond what the number format can hold.",
        BFLOAT16,
        "Check loss scaling and dtype casts, and keep softmax, norms and the loss in float32.",
        LOWER,
        CLIP,
    ),
    Cause.PRECISION_UNDERFLOW: (
        "Values became too small for the number format and were rounded to zero.",
        "Turn loss scaling on, or raise the scale, when training in float16.",
        "Keep weights and optimizer state in float32, and cast only for the forward pass.",
        BFLOAT16,
    ),
    Cause.OPTIMIZER_STATE: (
        "The optimizer's state is damaged, for example its second moment.",
        "Resume from the last good checkpoint, optimizer state included.",
        RESET,
        "Check that a resume loads the optimizer's state, for the same parameters and in float32.",
    ),
    Cause.WEIGHTS_DAMAGED: (
        "Weights hold values that training did not put there.",
        "Resume from the last good checkpoint that `surefoot checkpoints` can verify.",
        "Check what else writes to the weights: a late load, weight averaging, a cast.",
        "Check the device and its memory for errors.",
    ),
    Cause.TRANSIENT: (
        "Something outside the model and its data disturbed one or a few updates, and then was gone.",
        "Resume from the last good checkpoint with nothing changed.",
        "Check the device, its memory and its links for errors if it happens again.",
    ),
    Cause.INITIALISATION: (
        "The weights were initialised to values from which this model cannot learn well.",
        "Initialise with Xavier, or with Kaiming before a ReLU, and projection layers first.",
        "Check that a projection layer's dimensions match the layers on both sides.",
        WARMUP,
    ),
    Cause.EXPLODING_GRADIENT: (
        "Gradients grow from layer to layer until an update is far too large.",
        CLIP,
        LOWER,
        "Raise the clip threshold if most steps are clipped, lower it if none: peaks of 10-20 need 5-10.",
        "Give parameter groups their own clip threshold: vision encoders tolerate a higher one.",
    ),
    Cause.VANISHING_GRADIENT: (
        "Gradients shrink from layer to layer until the first layers learn nothing.",
        "Initialise with Xavier or Kaiming, whichever fits the activation.",
        "Add residual connections and normalisation between layers.",
        "Replace sigmoid and tanh between layers with ReLU or GELU.",
    ),
    Cause.DEAD_UNITS: (
        "Many units output zero for every input and can no longer learn.",
        LOWER,
        "Replace ReLU with GELU or leaky ReLU.",
        "Initialise weights with Kaiming, and biases with zero or slightly above.",
    ),
    Cause.LOGIT_GROWTH: (
        "Logits keep growing until softmax saturates at one answer.",
        LOWER,
        "Normalise queries and keys before attention.",
        "Add a small penalty on the logits (z-loss), or weight decay.",
        SOFTMAX,
    ),
    Cause.ATTENTION_MASK: (
        "Attention's mask or padding is wrong, or a sequence is too long.",
        "Check that every row of the mask leaves something to attend to: softmax of only -inf is NaN.",
        "Check that padding is masked, and that masked positions get -inf, not 0.",
        "Group sequences by length and truncate those that are too long.",
        SOFTMAX,
    ),
    Cause.LOG_OF_ZERO: (
        "The loss took the log of zero, or divided by zero.",
        EPSILON,
        "Clamp probabilities and denominators away from zero.",
        SOFTMAX,
        "Check for batches in which no element is left to average over.",
    ),
    Cause.ZERO_VARIANCE: (
        "A norm layer divided by the zero variance of values that were all the same.",
        "Set the norm's epsilon inside the square root: 1e-5 is usual.",
        "Remove constant inputs, such as empty sequences and all-black images.",
        "Replace batch norm with group or layer norm if batches are small.",
    ),
    Cause.PLATEAU: (
        "The loss no longer goes down.",
        "Check the data: labels match inputs, batches are shuffled, and the target can be learned from them.",
        "Raise the learning rate if it is small or its schedule ended early.",
        "Lower the learning rate if the loss goes up and down around the same value.",
    ),
    Cause.NOT_UPDATING: (
        "Gradients are there, but the weights do not change.",
        "Check that the optimizer holds the parameters the model uses, and that none is frozen.",
        "Check that the learning rate is not zero, and that gradients are zeroed after the step.",
        "Unscale before clipping: clipping scaled gradients leaves almost nothing of them.",
        "Keep the weights in float32: bfloat16 rounds small updates away.",
    ),
    Cause.OVERFITTING: (
        "The model memorises its training data and gets worse on other data.",
        "Train for fewer epochs, and keep the checkpoint with the best evaluation.",
        "Add dropout or weight decay.",
        "Get more data, or augment the existing data.",
    ),
    Cause.OSCILLATION: (
        "The loss swings up and down and does not improve.",
        LOWER,
        CLIP,
        SHUFFLE,
        "Check the schedule, and reset the optimizer's state if it is damaged.",
    ),
    Cause.OUT_OF_MEMORY: (
        "A step needs more memory than the device has.",
        "Use a smaller batch, with accumulation over more of them to keep the update the same.",
        "Use a shorter sequence.",
        "Turn activation checkpointing on.",
    ),
    Cause.MEMORY_LEAK: (
        "Memory grows with every step and is not freed.",
        "Store losses as loss.detach() or loss.item(): the loss itself keeps its whole graph alive.",
        "Check lists, caches and hooks that grow every step.",
        "Resume from a checkpoint in a new process before memory runs out.",
    ),
    Cause.DATA_STARVATION: (
        "Training is slow because it waits for data.",
        "Give the data loader more workers, pinned memory and prefetching.",
        "Prepare the data once and store it on local disk in larger files.",
        "Use a larger batch if a step is short.",
        "Turn mixed precision on or add devices if it is still slow once data arrives in time.",
    ),
    Cause.LAUNCH_BOUND: (
        "The device waits for the host, which launches many small kernels.",
        "Use a larger batch, or a longer sequence, so that each kernel has more to do.",
        "Use torch.compile, with mode='reduce-overhead' where shapes stay the same.",
        "Use fused=True or foreach=True in the optimizer.",
        "Remove .item(), .cpu(), print and other waits for the device from the loop.",
    ),
    Cause.SLOW_SAVING: (
        "Steps are slow while a checkpoint is written.",
        "Keep checkpoints on a fast local disk, and copy them from there.",
        "Raise the number of updates between two checkpoints: Policy(save_every=...).",
        "Check how full and how busy that disk is.",
    ),
    Cause.SLOW_MACHINE: (
        "Steps take longer than they did, and neither data nor a checkpoint is the reason.",
        "Check what else runs on this machine, and the device's clock and temperature (nvidia-smi -q -d PERFORMANCE).",
        "Compare sequence lengths and batch sizes with those before: longer input takes longer.",
        "Compare the step times of all ranks: one slow rank holds up the others.",
    ),
    Cause.RANK_FAULT: (
        "One rank computes something different from the others.",
        "Remove that rank's machine and resume on the others.",
        "Check its device, its memory and its part of the data.",
        "Compare seeds, weights and software versions between ranks.",
    ),
    Cause.LEAK: (
        "The model sees what it should predict, or one sample influences another.",
        "Use a causal mask for next-token prediction, and no bidirectional layer.",
        "Remove the target, and what is computed from it, from the inputs.",
        "Check dimensions: batch_first of attention and recurrent layers, the dim of softmax, view for transpose.",
    ),
    Cause.LOSS_FUNCTION: (
        "The loss does not measure what the outputs and targets mean.",
        "Give cross_entropy raw logits: it applies log_softmax itself, as the loss with logits applies sigmoid.",
        "Check that the shapes of outputs and targets are equal: (n, 1) and (n,) broadcast to (n, n).",
        "Check the sign of the loss, the class dimension and the reduction.",
    ),
    Cause.MODE: (
        "Modules are in the wrong mode.",
        "Put the model into training mode, model.train(), before training and after each evaluation.",
        "Use nn.Dropout, or F.dropout(x, training=self.training).",
    ),
    Cause.DATA_ORDER: (
        "Batches are sorted, so that each shows only a part of the data.",
        "Shuffle the samples: DataLoader(..., shuffle=True).",
        "Shuffle before samples are split among ranks and workers.",
    ),
    Cause.REPEATED_DATA: (
        "The same samples come again and again.",
        "Check that every step fetches a new batch, and that the loader goes through the whole data set.",
        "Give each worker a seed of its own where random numbers make or augment samples.",
        "Remove duplicates from the data.",
    ),
    Cause.REGULARISATION: (
        "Regularisation is stronger than what the loss teaches.",
        "Lower weight decay: 0.01 to 0.1 with AdamW, 1e-4 with SGD.",
        "Lower dropout, and use none after the last layer.",
    ),
    Cause.OPTIMIZER_SETTINGS: (
        "The optimizer's settings do not fit the gradients.",
        "Compare betas, eps, decay and learning rate with a run that works.",
        "Keep eps far below the gradients: 1e-8 for Adam in float32.",
    ),
    Cause.CLIPPING: (
        "Clipping leaves little of the gradients.",
        "Set the clip threshold at 2-3x the normal norm.",
        "Clip after backward and before the step, and unscale first.",
    ),
    Cause.DETACHED: (
        "A part of the model is cut off from the loss, so that it gets no gradient.",
        "Look for .detach(), .data, .item(), .numpy(), torch.no_grad() and torch.tensor(...) on the way to the loss.",
        "Check that every output that should be trained is part of the loss.",
    ),
    Cause.UNREGISTERED: (
        "Weights that the model uses are not held by the optimizer.",
        "Keep layers in nn.ModuleList or nn.ModuleDict and weights in nn.Parameter, not in plain lists or attributes.",
        "Give the optimizer the model's own parameters, once the model is complete.",
    ),
    Cause.FROZEN: (
        "Weights that should be trained are frozen.",
        "Set requires_grad_(True) on them, and leave frozen ones out of the optimizer.",
        "Check the names of all parameters whose requires_grad is False.",
    ),
    Cause.PADDING: (
        "Padding is treated as data.",
        "Set ignore_index=pad_id in the loss, or multiply it with the mask.",
        "Give the model the padding mask.",
    ),
    Cause.SYMMETRY: (
        "Units are identical and stay so, because they get the same gradient.",
        "Initialise weights at random: nn.init.kaiming_uniform_ or xavier_uniform_.",
        "Check for layers whose weights are set to a constant.",
    ),
    Cause.COLLAPSE: (
        "The outputs become the same for all samples.",
        "Check the negatives, the stop-gradient and the temperature of a contrastive loss.",
        "Compare the loss of constant outputs with the loss of real ones.",
    ),
    Cause.WEIGHTS_OVERWRITTEN: (
        "Weights are changed by something other than the optimizer.",
        "Look for load_state_dict, initialisation and copies inside the loop or forward.",
        "Keep averaged weights in a copy of the model.",
    ),
    Cause.UNKNOWN: (
        "The numbers do not show the cause.",
        GO_BACK,
        "Run the last batches again under torch.autograd.set_detect_anomaly, and with other seeds.",
        "Compare with the last run that worked: code, data, settings and versions.",
    ),
}
"""For each cause: the sentence, then the remedies."""

MACHINE_CAUSES = frozenset(
    {Cause.DATA_STARVATION, Cause.LAUNCH_BOUND, Cause.SLOW_SAVING, Cause.SLOW_MACHINE, Cause.MEMORY_LEAK}
)
"""Causes that have nothing to do with what is learnt: advice about learning rate or clipping does not help."""
CAUSES: Mapping[Cause, CauseText] = MappingProxyType(
    {cause: CauseText(sentence, tuple(remedies)) for cause, (sentence, *remedies) in _TABLE.items()}
)
"""The text of every cause."""
