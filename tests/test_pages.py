"""Pages of the book that are made of what was measured."""

import json

from book import pages


def test_the_check_of_a_gpu_has_its_words_and_a_table_for_each_check(tmp_path, monkeypatch):
    rows = [
        {"check": "machine", "device": "H200", "loss_chunk": 0},
        {"check": "parity", "plan": "dp=2", "error": 1e-6, "ok": True},
        {"check": "parity", "plan": "tp=2", "error": None, "ok": False, "message": "a | b\nc"},
    ]
    measured = tmp_path / "notebooks/assets/measured"
    measured.mkdir(parents=True)
    (measured / "gpu.json").write_text(json.dumps(rows), encoding="utf-8")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = pages.rows_page()
    assert "## gpu\n\nBy `make gpu-check`." in page
    assert "Check machine, device H200, loss chunk 0.\n" in page
    assert "In all rows: check parity.\n\n| plan | error | ok | message |\n" in page
    assert "| tp=2 |  | False | a \\| b c |" in page


def test_each_bench_has_its_words_and_a_table():
    page = pages.rows_page()
    files = [*(pages.ROOT / "notebooks/assets/measured").glob("*.json")]
    assert files and page.count("In all rows: ") >= len(files)
    assert all(f"`minipar bench {file.stem}`" in page for file in files if file.stem != "gpu")
