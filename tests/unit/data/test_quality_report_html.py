"""The report of regard data check as HTML."""

from html.parser import HTMLParser

from regard.data.quality_report import Finding, HeldOutSplit, Histogram, NoiseExample, QualityReport
from regard.data.quality_report_html import page

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Checks that elements are nested properly, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "link")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_complete_and_safe() -> None:
    example = NoiseExample(7, "<script>alert(1)</script>", "a\x07b", "why & how")
    report = QualityReport(
        ["a<b.tsv"],
        ("en", "de"),
        1000,
        10,
        [Finding("html", "tags & such", True, "drop them", 10, 0.01, [example])],
        {"language": "needs <py3langid>"},
        ["bad lines skipped: 3"],
        [],
        [HeldOutSplit("test", 5, 2, 0.1, 0.5)],
        [Histogram("length", [0.0, 20.0], [3, 4])],
        ["regard data clean a.tsv  drops 10 pairs"],
    )
    html = page(report)
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    for text in (
        "<script>alert(1)</script>",
        "a\\x07b",
        "why & how",
        "2 of 5",
        "1,000",
        "10 (1.00%)",
    ):
        assert text in checker.text
    assert "http" not in html.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html


def test_a_report_without_findings() -> None:
    assert "Nothing." in page(QualityReport(["a.tsv"], None))
