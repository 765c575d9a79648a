"""Tables of cells for notebooks and terminals."""

from regard.inspection.display_tables import Cell, heat_table, scaled, text_table


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


def test_columns_of_text_are_aligned_also_with_wide_characters() -> None:
    assert text_table([["a", "我们", "x"], ["bcd", "e", "y"]]) == "a    我们  x\nbcd  e     y"
