"""Inspection: traces of single translations, lenses, alignment, and the training history of a model.

from regard.inspection import attribute, logit_lens, patch

logit_lens(model, "The cat was hungry.")                      # each displays itself in a notebook
attribute(model, "The cat was hungry.", "Katze", "Hund")
"""

from regard.inspection.activations import (
    Activations as Activations,
    Embeddings as Embeddings,
    activations as activations,
    embeddings as embeddings,
)
from regard.inspection.attribution import Attribution as Attribution, attribute as attribute
from regard.inspection.head_ablation import (
    HeadTable as HeadTable,
    ablate_heads as ablate_heads,
    mean_ablated as mean_ablated,
)
from regard.inspection.hooks import Head as Head, mute_heads as mute_heads
from regard.inspection.logit_lens import (
    DepthLens as DepthLens,
    decoder_lens as decoder_lens,
    logit_lens as logit_lens,
)
from regard.inspection.patching import (
    PatchMap as PatchMap,
    break_choice as break_choice,
    contrasts as contrasts,
    find_carriers as find_carriers,
    patch as patch,
)
