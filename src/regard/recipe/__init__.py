"""Recipes: the schema, presets, registries of components, validation, and reading from YAML."""

from regard.recipe.decoding import (
    MBR_TEMPERATURE as MBR_TEMPERATURE,
    MIN_TEMPERATURE as MIN_TEMPERATURE,
    DecodingConfig as DecodingConfig,
    DecodingOptions as DecodingOptions,
)
from regard.recipe.parsing import (
    abbreviate as abbreviate,
    bundled_recipes as bundled_recipes,
    decoding_overrides as decoding_overrides,
    load_recipe as load_recipe,
    make_recipe as make_recipe,
    override_decoding as override_decoding,
    parse_choice as parse_choice,
    parse_recipe as parse_recipe,
    suggest as suggest,
)
from regard.recipe.registry import FORMATS as FORMATS, Choice as Choice, Registry as Registry
from regard.recipe.schema import (
    ALL_BUT as ALL_BUT,
    FREEZE_GROUPS as FREEZE_GROUPS,
    PRESETS as PRESETS,
    AttentionSite as AttentionSite,
    AugmentConfig as AugmentConfig,
    CleaningConfig as CleaningConfig,
    DataConfig as DataConfig,
    DataFiles as DataFiles,
    Device as Device,
    ModelConfig as ModelConfig,
    Precision as Precision,
    Preset as Preset,
    Recipe as Recipe,
    TokenizerConfig as TokenizerConfig,
    TrainingConfig as TrainingConfig,
    language_tag as language_tag,
)
from regard.recipe.validation import (
    PACKED_CHUNKS as PACKED_CHUNKS,
    as_written as as_written,
    max_sequence_length as max_sequence_length,
    model_choices as model_choices,
)
