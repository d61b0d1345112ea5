"""The corpus is real, the same every time, and split without leaks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from csa_dispatch.demo.corpus import (
    CorpusError,
    Split,
    baselines,
    draw_spans,
    is_held_out,
    load_corpus,
    source_files,
    standard_library,
)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


def _split(*files: bytes) -> Split:
    lengths = torch.tensor([0, *map(len, files)])
    return Split(torch.tensor(list(b"".join(files)), dtype=torch.uint8), lengths.cumsum(0))


def test_two_loads_give_the_same_text(corpus):
    again = load_corpus()
    assert again.digest == corpus.digest
    assert torch.equal(again.train.text, corpus.train.text)
    assert torch.equal(again.held_out.offsets, corpus.held_out.offsets)


def test_every_file_of_the_library_is_in_one_split_whole(corpus):
    expected = {True: [], False: []}
    for name, path in source_files(standard_library()):
        expected[is_held_out(name)].append(path.read_bytes())
    for held_out, split in ((False, corpus.train), (True, corpus.held_out)):
        assert split.files == len(expected[held_out]) > 10
        assert bytes(split.text.tolist()) == b"".join(expected[held_out])


def test_tests_and_other_peoples_packages_are_left_out(tmp_path: Path):
    for name in ("a.py", "test/b.py", "site-packages/c.py", "pkg/d.py", "pkg/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert [name for name, _ in source_files(tmp_path)] == ["a.py", "pkg/d.py"]


def test_a_library_without_sources_is_an_error_that_says_what_to_do(tmp_path: Path):
    with pytest.raises(CorpusError, match="whose standard library is installed"):
        load_corpus(tmp_path)


def test_no_span_crosses_two_files_and_every_start_occurs():
    split = _split(b"aaaaa", b"bb", b"cccc")
    spans = draw_spans(split, 400, 3, torch.Generator().manual_seed(0))
    assert {bytes(span) for span in spans.tolist()} == {b"aaa", b"ccc"}
    # Three starts in the first file and two in the last.
    share = (spans[:, 0] == ord("a")).double().mean()
    assert 0.5 < share < 0.7


def test_spans_longer_than_every_file_are_refused():
    with pytest.raises(ValueError, match="no file holds 9 bytes"):
        draw_spans(_split(b"abc", b"abcdef"), 1, 9, torch.Generator())


def test_baselines_are_the_cross_entropy_of_the_counts():
    spans = torch.tensor([list(b"abab")])
    found = baselines(_split(b"ab" * 8), spans)
    zero = (8 + 1 / 256) / 17
    after_a, after_b = (8 + zero) / 9, (7 + zero) / 8
    assert found.order0 == pytest.approx(-math.log2(zero))
    expected = -(2 * math.log2(after_a) + math.log2(after_b)) / 3
    assert found.order1 == pytest.approx(expected)


def test_on_real_text_pairs_predict_better_than_bytes(corpus):
    spans = draw_spans(corpus.held_out, 16, 257, torch.Generator().manual_seed(1))
    found = baselines(corpus.train, spans)
    assert 2 < found.order1 < found.order0 - 0.5 < 8
