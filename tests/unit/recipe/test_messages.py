"""No error message of a recipe shows Python's notation or a name of the code, whatever is wrong with whichever key."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from regard.errors import RegardError
from regard.recipe import as_written, make_recipe, override_decoding

PYTHON = re.compile(
    r"\bNone\b|\bTrue\b|\bFalse\b|[Tt]uple|\bdictionary\b|\binstance of\b|\bdict\b|\bclass\b|\w+Config\b|\w+Error\b"
    r"|DataFiles|object at|<[a-z]+ |, ?\)|\((?:'|\d[\d.]*,)|\bInput\b|\bfinite_number\b"
)
WRONG: list[Any] = [
    None,
    True,
    -1,
    1.5,
    "nonsense",
    [],
    ["a", 2],
    ("a", None),
    {"a": None},
    10**400,
]


def _keys(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


BASE = {"data": {"train": {"pairs": "x.tsv"}}}
KEYS = list(_keys(make_recipe(BASE, "test").model_dump()))


def _recipe_with(key: str, value: Any) -> dict[str, Any]:
    *sections, name = key.split(".")
    values: dict[str, Any] = {"data": {"train": {"pairs": "x.tsv"}}}
    inner = values
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    return values


def _messages(key: str) -> Iterator[str]:
    for value in WRONG:
        try:
            make_recipe(_recipe_with(key, value), "my.yaml")
        except RegardError as error:
            yield str(error)


@pytest.mark.parametrize("section", [key for key in KEYS if "." not in key])
def test_no_message_shows_python(section: str) -> None:
    keys = [key for key in KEYS if key.split(".")[0] == section]
    messages = [message for key in keys for message in _messages(key)]
    assert len(messages) >= len(keys)
    assert [message for message in messages if PYTHON.search(message)] == []


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"training": {"optimizer": "sgd", "betas": (0.8, 0.9)}}, "training.betas: [0.8, 0.9] has"),
        (
            {
                "task": "tagging",
                "tokenizer": {"shared": False},
                "decoding": {"protect": ["numbers"]},
            },
            "[numbers] has",
        ),
    ],
)
def test_an_option_without_effect_is_shown_as_it_is_written(
    changes: dict[str, Any], shown: str
) -> None:
    with pytest.raises(RegardError) as raised:
        make_recipe({**BASE, **changes}, "my.yaml")
    assert shown in str(raised.value)
    assert not PYTHON.search(str(raised.value))


def _decoding_messages() -> Iterator[str]:
    decoding = make_recipe(BASE, "test").decoding
    for value in WRONG:
        for key in type(decoding).model_fields:
            try:
                override_decoding(decoding, {key: value})
            except RegardError as error:
                yield str(error)


def test_decoding_options_are_shown_as_they_are_written() -> None:
    messages = [*_decoding_messages()]
    assert messages
    assert [message for message in messages if PYTHON.search(message)] == []


def test_values_are_written_as_in_yaml() -> None:
    values = (None, True, 0.5, "bleu", (0.9, None), {"upper": 0.1, "to": ["de"]})
    assert [*map(as_written, values)] == [
        *("null", "true", "0.5", "bleu", "[0.9, null]", "{upper: 0.1, to: [de]}")
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training": {"batching": "packed"}}, "needs batching: padded"),
        ({"model": {"norm": "batch"}}, "would count every batch twice"),
    ],
)
def test_activation_checkpointing_is_refused_where_it_would_be_wrong(
    values: dict[str, Any], message: str
) -> None:
    training = {"activation_checkpointing": True, **values.get("training", {})}
    with pytest.raises(RegardError, match=f"training.activation_checkpointing: true {message}"):
        make_recipe({**BASE, **values, "training": training}, "test")
