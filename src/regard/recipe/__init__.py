"""Recipes: what a choice may be called, what they hold, what does not go together, how they are read."""

from regard.recipe.names import (
    Activation as Activation,
)
from regard.recipe.names import (
    Architecture as Architecture,
)
from regard.recipe.names import (
    Average as Average,
)
from regard.recipe.names import (
    Batches as Batches,
)
from regard.recipe.names import (
    DecoderPattern as DecoderPattern,
)
from regard.recipe.names import (
    Device as Device,
)
from regard.recipe.names import (
    EncoderPattern as EncoderPattern,
)
from regard.recipe.names import (
    Keep as Keep,
)
from regard.recipe.names import (
    LabelMeasure as LabelMeasure,
)
from regard.recipe.names import (
    LearningPrecision as LearningPrecision,
)
from regard.recipe.names import (
    Length as Length,
)
from regard.recipe.names import (
    Likelihood as Likelihood,
)
from regard.recipe.names import (
    Manner as Manner,
)
from regard.recipe.names import (
    Measure as Measure,
)
from regard.recipe.names import (
    MemoryPattern as MemoryPattern,
)
from regard.recipe.names import (
    Norm as Norm,
)
from regard.recipe.names import (
    Normalization as Normalization,
)
from regard.recipe.names import (
    NormPlace as NormPlace,
)
from regard.recipe.names import (
    Optimizer as Optimizer,
)
from regard.recipe.names import (
    Overlap as Overlap,
)
from regard.recipe.names import (
    Pattern as Pattern,
)
from regard.recipe.names import (
    Place as Place,
)
from regard.recipe.names import (
    Position as Position,
)
from regard.recipe.names import (
    Precision as Precision,
)
from regard.recipe.names import (
    Preset as Preset,
)
from regard.recipe.names import (
    Schedule as Schedule,
)
from regard.recipe.names import (
    Score as Score,
)
from regard.recipe.names import (
    Smoothing as Smoothing,
)
from regard.recipe.names import (
    Task as Task,
)
from regard.recipe.names import (
    TokenizerKind as TokenizerKind,
)
from regard.recipe.names import (
    Weighting as Weighting,
)
from regard.recipe.reading import (
    change_search as change_search,
)
from regard.recipe.reading import (
    load_recipe as load_recipe,
)
from regard.recipe.reading import (
    make_recipe as make_recipe,
)
from regard.recipe.reading import (
    nearest as nearest,
)
from regard.recipe.reading import (
    one_of as one_of,
)
from regard.recipe.reading import (
    parse_recipe as parse_recipe,
)
from regard.recipe.reading import (
    search_changes as search_changes,
)
from regard.recipe.reading import (
    shipped_recipes as shipped_recipes,
)
from regard.recipe.refusals import (
    PARTS as PARTS,
)
from regard.recipe.sections import (
    COLDEST as COLDEST,
)
from regard.recipe.sections import (
    PRESETS as PRESETS,
)
from regard.recipe.sections import (
    Attention as Attention,
)
from regard.recipe.sections import (
    Clean as Clean,
)
from regard.recipe.sections import (
    Data as Data,
)
from regard.recipe.sections import (
    Files as Files,
)
from regard.recipe.sections import (
    Model as Model,
)
from regard.recipe.sections import (
    Probability as Probability,
)
from regard.recipe.sections import (
    Recipe as Recipe,
)
from regard.recipe.sections import (
    Scoring as Scoring,
)
from regard.recipe.sections import (
    Search as Search,
)
from regard.recipe.sections import (
    Section as Section,
)
from regard.recipe.sections import (
    Texts as Texts,
)
from regard.recipe.sections import (
    Tokenizer as Tokenizer,
)
from regard.recipe.sections import (
    Training as Training,
)
from regard.recipe.sections import (
    language_tag as language_tag,
)
