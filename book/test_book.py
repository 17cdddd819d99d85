"""The book as a reader meets it, in a browser without a network: `make test-book`.

Needs what `make book` installs, and Chromium (the system's, or `playwright install chromium`).
"""

import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
HTML = ROOT / os.environ.get("BOOK", "build/book")
PAGES = sorted(p.relative_to(HTML).as_posix() for p in HTML.glob("[bnt]*/**/*.html"))
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
each_page = pytest.mark.parametrize("page", PAGES)


class Links(HTMLParser):
    """What a page links to, and the names it can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.names = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links |= {attrs[name] for name in ("href", "src") if attrs.get(name)}
        self.names |= {attrs.get("id"), attrs.get("name")}


def read(path: Path) -> Links:
    return Links(path.read_text(encoding="utf-8"))


def broken(page: Path) -> list[str]:
    """Links of a page to what is not there."""
    found = []
    for link in read(page).links:
        where, name = urldefrag(link)
        if where.startswith(("http:", "https:", "data:", "mailto:", "javascript:")):
            continue
        target = (page.parent / unquote(where.split("?")[0])).resolve() if where else page
        if not target.exists() or (name and target.suffix == ".html" and not named(target, name)):
            found.append(link)
    return found


def named(target: Path, name: str) -> bool:
    return unquote(name) in read(target).names


# ---------------------------------------------------------------------- files
def test_the_book_has_all_pages():
    assert {f"notebooks/{name}.html" for name in NOTEBOOKS} <= set(PAGES)
    assert {
        "book/index.html",
        "book/measured.html",
        "book/strategies.html",
        "book/rows.html",
    } <= set(PAGES)
    assert {"tests/TRAPS.html", "notebooks/README.html", "book/library.html"} <= set(PAGES)


@each_page
def test_all_links_inside_lead_somewhere(page):
    assert broken(HTML / page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<a href="gone.html">1</a><a href="#gone">2</a><a href="#here" id="here">3</a>')
    assert sorted(broken(page)) == ["#gone", "gone.html"]


@each_page
def test_nothing_is_fetched_from_elsewhere(page):
    text = (HTML / page).read_text(encoding="utf-8")
    for tag in ("script", "link", "img"):
        for part in text.split(f"<{tag} ")[1:]:
            assert "http" not in part.split(">")[0].replace('rel="canonical"', ""), part[:200]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_can_be_downloaded_and_opened_in_colab(name):
    links = read(HTML / f"notebooks/{name}.html").links
    assert f"../_sources/notebooks/{name}.ipynb" in links
    repository = os.environ["GITHUB_REPOSITORY"]
    assert (
        f"https://colab.research.google.com/github/{repository}/blob/colab/notebooks/{name}.ipynb"
        in links
    )


# ---------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def browser():
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, page: str, size: dict = WIDE):
    """A page that is open, and the list of what goes wrong in it."""
    tab, wrong = browser.new_page(viewport=size), []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("requestfailed", lambda request: wrong.append(request.url))
    tab.goto((HTML / page).as_uri())
    return tab, wrong


@each_page
def test_a_page_opens_without_an_error_on_a_desk_and_on_a_phone(browser, page):
    for size in (WIDE, NARROW):
        tab, wrong = opened(browser, page, size)
        assert not wrong
        assert tab.evaluate("document.documentElement.scrollWidth") <= size["width"]
        tab.close()


def test_an_error_of_a_script_is_seen(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<script>undefined_function()</script>")
    tab, wrong = opened(browser, page)
    assert "undefined_function" in wrong[0]
    tab.close()


def test_search_finds_a_word(browser):
    tab, _ = opened(browser, "search.html")
    tab.goto((HTML / "search.html").as_uri() + "?q=reduce-scatter")
    tab.locator("#search-results li").first.wait_for(timeout=20_000)
    tab.close()


def test_next_leads_through_the_notebooks(browser):
    tab, _ = opened(browser, "book/index.html")
    for name in NOTEBOOKS[:3]:
        tab.locator("a.right-next").click()
        assert tab.url.endswith(f"{name}.html")
    tab.locator("a.left-prev").click()
    assert tab.url.endswith(f"{NOTEBOOKS[1]}.html")
    tab.close()
