"""Subtitles."""

from regard.documents.subtitles import break_lines
from tests.unit.documents import samples
from tests.unit.documents.translators import parse, translate


def test_subtitles_keep_times_and_tags() -> None:
    assert translate("a.srt", samples.SRT, str.upper).decode() == (
        "1\n00:00:01,000 --> 00:00:02,500\n<i>THE DOG WAS TOO TIRED TO CROSS THE STREET.</i>\n\n"
        "2\n00:00:03,000 --> 00:00:04,000 X1:10 X2:20\n- WHERE IS IT?\n- IT IS {\\an8}HERE.\n\n"
        "3\n00:00:05,000 --> 00:00:06,000\n♪ ♪\n"
    )
    translated = translate("a.vtt", samples.VTT, str.upper).decode()
    assert translated.startswith(samples.VTT[: samples.VTT.index("<v Roger>")])
    assert "<v Roger>NEVER DRINK <b>LIQUID</b> &amp; COLD NITROGEN.\n" in translated
    assert "IT WILL <00:06.000>PERFORATE YOUR STOMACH.\n" in translated


def test_the_dash_of_a_speaker_may_follow_a_style() -> None:
    cue = "1\n00:00:01,000 --> 00:00:02,000\n{\\an8}<i>- One dog.</i>\n<i>- Two</i>\n"
    assert parse("a.srt", cue).sentences == ["One dog.", "Two"]
    assert translate("a.srt", cue, lambda text: "x") == (
        cue.replace("One dog.", "x").replace("Two", "x").encode()
    )


def test_long_subtitles_are_broken_into_equal_lines() -> None:
    text = "<i>one two three four five six seven eight nine ten eleven twelve</i>"
    broken = break_lines(42, "\n", text)
    assert broken == "<i>one two three four five six seven\neight nine ten eleven twelve</i>"
    assert break_lines(42, "\r\n", "short\nshort") == "short\r\nshort"
