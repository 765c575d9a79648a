import gzip
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, strategies as st

from regard.data.corpus import fingerprint, is_held_out, read_pairs
from regard.errors import RegardError
from regard.recipe import DataConfig, DataFiles


def compressed(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its suffix says."""
    compress = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(compress.get(path.suffix, bytes)(content))
    return path


def test_a_missing_file_is_reported_at_once_with_its_key_and_the_remedy(tmp_path: Path) -> None:
    files = DataFiles(source=("s",), target=("gone",))
    compressed(tmp_path / "s", b"a\n")
    with pytest.raises(RegardError) as error:
        read_pairs(files, DataConfig(root=str(tmp_path), train=files), "data.valid")
    assert str(error.value) == (
        f"data.valid.target: no such file: {tmp_path / 'gone'} "
        "(set the folder with --set data.root=DIR or $REGARD_DATA)"
    )


def test_the_held_out_fraction_is_stable_and_about_right() -> None:
    held = [is_held_out(f"sentence {n}", 0.02) for n in range(20_000)]
    assert 300 < sum(held) < 500
    # These must never change: a resumed run must hold out the same sources.
    assert [n for n in range(100) if is_held_out(f"sentence {n}", 0.02)] == [67, 84, 96]
    assert not any(is_held_out(str(n), 0.0) for n in range(100))


@pytest.mark.parametrize("variant", ["{} äpfel essen", "{} A\u0308pfel essen", " {} Äpfel Essen "])
def test_case_and_unicode_form_of_a_source_do_not_matter(variant: str) -> None:
    for number in range(50):
        assert is_held_out(variant.format(number), 0.3) == is_held_out(f"{number} Äpfel essen", 0.3)


@given(source=st.text(), smaller=st.floats(0, 0.5), larger=st.floats(0, 0.5))
def test_a_larger_fraction_holds_out_a_superset(source: str, smaller: float, larger: float) -> None:
    smaller, larger = sorted((smaller, larger))
    assert is_held_out(source, larger) or not is_held_out(source, smaller)


def test_the_fingerprint_depends_on_content_and_key_not_on_names(tmp_path: Path) -> None:
    for name, text in {"a": "1\n", "b": "2\n", "c": "1\n"}.items():
        compressed(tmp_path / name, text.encode())

    def fingerprint_of(source: str, target: str) -> str:
        files = DataFiles(source=(source,), target=(target,))
        return fingerprint(files, DataConfig(root=str(tmp_path), train=files))

    assert fingerprint_of("a", "b") == fingerprint_of("c", "b")
    assert fingerprint_of("a", "b") != fingerprint_of("b", "a")
    assert len(fingerprint_of("a", "b")) == 64
    with pytest.raises(RegardError, match="no such file"):
        fingerprint_of("a", "gone")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RegardError, match="a folder, not a file"):
        fingerprint_of("a", "folder")


def test_reading_text_does_not_import_torch_sentencepiece_or_pyarrow() -> None:
    code = (
        "import sys, regard.data.corpus; "
        "print([m for m in ('torch', 'sentencepiece', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
