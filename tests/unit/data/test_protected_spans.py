"""Protected spans: found in the source, and compared with the translation."""

import pytest

from regard.data.protected_spans import ProtectedSpans

EVERYTHING = ProtectedSpans(("placeholders", "numbers"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Hello {name}, you owe {0:.2f}.", ["{name}", "{0:.2f}"]),
        ("a ${dir} and {{ user.name }} and {}", ["${dir}", "{{ user.name }}", "{}"]),
        ("Hello %{name}, 5 %{count}", ["%{name}", "5", "%{count}"]),
        ("%s of %(n)d, %1$s, %5.2f and %@", ["%s", "%(n)d", "%1$s", "%5.2f", "%@"]),
        ("50% of them, 100 %sure", ["50", "100"]),
        ('a <b>word</b>, <br/> and <a href="x y">z</a>', ["<b>", "</b>", "<br/>", '<a href="x y">', "</a>"]),
        ("3 < 4 and 5 > 2", ["3", "4", "5", "2"]),
        ("see https://a.example/b?c=1, or www.b.example.", ["https://a.example/b?c=1", "www.b.example"]),
        ("write to a.b+c@d.example!", ["a.b+c@d.example"]),
        ("at 12:30 on 1/2/2024: 1,000.50 of 3", ["12:30", "1/2/2024", "1,000.50", "3"]),
        ("the B2B of 3D and x2", []),
        ("&nbsp; R&D", ["&nbsp;"]),
    ],
)  # fmt: skip
def test_protected_spans_are_found_whole(text: str, found: list[str]) -> None:
    assert list(EVERYTHING.find(text)) == found


def test_mismatches_are_reported_with_their_counts() -> None:
    protected = ProtectedSpans(("placeholders",))
    assert protected.mismatches("%s and %s, 3", "%s und vier") == [
        "%s occurs 2 time(s) in the source, 1 in the translation"
    ]
    assert protected.mismatches("a", "{b}") == [
        "{b} occurs 0 time(s) in the source, 1 in the translation"
    ]
    assert protected.mismatches("{b} <i>", "<i> {b}") == []
    assert ProtectedSpans(()).mismatches("%s", "") == []
