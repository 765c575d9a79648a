"""What is made small: cross-entropy with smoothed labels (section 5.4 of the paper)."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard import recipe
from regard.marks import PAD

SMOOTHINGS: dict[recipe.Smoothing, Callable[[float, int], float]] = {
    # Over all K classes, the right one too: it keeps 1 - eps + eps/K. This is torch's convention.
    "all": lambda epsilon, classes: epsilon,
    # Over the K - 1 others: the right one keeps 1 - eps. The same family with eps' = eps K / (K - 1).
    "others": lambda epsilon, classes: epsilon * classes / (classes - 1),
}


def cross_entropy(
    logits: Float[Tensor, "B T V"],
    wanted: Int[Tensor, "B T"],
    smoothing: float = 0.0,
    over: recipe.Smoothing = "all",
) -> Float[Tensor, ""]:
    """The sum over all real tokens; divide by their number for the mean. Padding counts nothing."""
    classes = logits.shape[-1]
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        wanted.flatten(),
        ignore_index=PAD,
        label_smoothing=SMOOTHINGS[over](smoothing, classes),
        reduction="sum",
    )
