"""Recipes: the schema, presets, registries of components, validation, and reading from YAML."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.decoding.options_and_logits_processors import (
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
    from regard.recipe.presets import PRESETS as PRESETS, Preset as Preset
    from regard.recipe.registry import FORMATS as FORMATS, Choice as Choice, Registry as Registry
    from regard.recipe.schema import (
        ALL_BUT as ALL_BUT,
        FREEZE_GROUPS as FREEZE_GROUPS,
        AttentionSite as AttentionSite,
        AugmentConfig as AugmentConfig,
        CleaningConfig as CleaningConfig,
        DataConfig as DataConfig,
        DataFiles as DataFiles,
        Device as Device,
        ModelConfig as ModelConfig,
        Precision as Precision,
        Recipe as Recipe,
        TokenizerConfig as TokenizerConfig,
        TrainingConfig as TrainingConfig,
        is_url as is_url,
        language_tag as language_tag,
    )
    from regard.recipe.validation import (
        PACKED_CHUNKS as PACKED_CHUNKS,
        as_written as as_written,
        max_sequence_length as max_sequence_length,
        model_choices as model_choices,
    )

_NAMES = {
    "decoding.options_and_logits_processors": """
        MBR_TEMPERATURE MIN_TEMPERATURE DecodingConfig DecodingOptions
    """,
    "recipe.parsing": """
        abbreviate bundled_recipes decoding_overrides load_recipe make_recipe
        override_decoding parse_choice parse_recipe suggest
    """,
    "recipe.presets": "PRESETS Preset",
    "recipe.registry": "FORMATS Choice Registry",
    "recipe.schema": """
        ALL_BUT FREEZE_GROUPS AttentionSite AugmentConfig CleaningConfig DataConfig
        DataFiles Device ModelConfig Precision Recipe TokenizerConfig TrainingConfig
        is_url language_tag
    """,
    "recipe.validation": "PACKED_CHUNKS as_written max_sequence_length model_choices",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import names when they are first used: the schema takes 0.2 seconds, a translation may need only a registry."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module 'regard.recipe' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"regard.{_MODULES[name]}"), name)
    return value
