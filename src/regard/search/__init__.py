"""Search for a good output sequence, given only how probable each token is.

Nothing here knows a model, a text or a file: a ``Step`` turns the last tokens and a ``State`` into
logits; a ``Predict`` the words known into logits of the hidden ones.
"""

from regard.search.beam import beam_search
from regard.search.constraints import Borders, Constraints, Phrase, Spelling, needs
from regard.search.coverage import Coverage
from regard.search.diversity import Diversity
from regard.search.guides import Guide
from regard.search.hypothesis import Hypothesis, length_penalty
from regard.search.manners import MANNERS
from regard.search.one_by_one import greedy, sample
from regard.search.parallel import Predict, Round, mask_predict
from regard.search.repetition import NoRepeat
from regard.search.rules import State, Step
from regard.search.tree import Node, Tree

__all__ = [
    "MANNERS",
    "Borders",
    "Constraints",
    "Coverage",
    "Diversity",
    "Guide",
    "Hypothesis",
    "NoRepeat",
    "Node",
    "Phrase",
    "Predict",
    "Round",
    "Spelling",
    "State",
    "Step",
    "Tree",
    "beam_search",
    "greedy",
    "length_penalty",
    "mask_predict",
    "needs",
    "sample",
]
