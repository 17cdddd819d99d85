"""Pages of the book that are made of what was measured."""

from book import pages


def test_each_bench_has_its_words_and_a_table():
    page = pages.rows_page()
    files = [*(pages.ROOT / "notebooks/assets/measured").glob("*.json")]
    assert files and page.count("In all rows: ") >= len(files)
    assert all(f"`minipar bench {file.stem}`" in page for file in files if file.stem != "gpu")
