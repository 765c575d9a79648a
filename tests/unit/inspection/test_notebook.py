"""Tables for notebooks."""

from regard.inspection.notebook import Cell, heat_table, scaled


def test_cells_are_coloured_by_value_and_text_is_escaped() -> None:
    html = heat_table("<b>", ["row"], ["<one>", "two"], [[Cell("<x>", 1.0), Cell("y", -0.5)]])
    assert "&lt;b&gt;" in html
    assert "&lt;x&gt;" in html
    assert "rgba(64, 120, 220, 0.60)" in html
    assert "rgba(214, 122, 20, 0.30)" in html


def test_values_are_scaled_to_the_largest() -> None:
    assert scaled([1.0, -4.0]) == [0.25, -1.0]
    assert scaled([0.0]) == [0.0]
    assert scaled([]) == []
