"""`scripts/docs --check`: opens each page of the site in headless Chromium, as wide as a screen and as a phone, light and dark.

axe-core looks for what a reader cannot see, reach or hear: contrast, names of links, the order of headings, and the like. The
rest is looked for here: nothing may reach over a page's right edge, and each link within the site has to lead somewhere.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

SITE = Path(__file__).parents[2] / "docs" / "_build" / "html"
WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")
# Made by Sphinx, of no text of ours but code; and what only leads to the first page.
NOT_OURS = ("genindex.html", "py-modindex.html", "search.html", "index.html", "_modules")

# What reaches over the edge: the page itself, and commands that cannot be seen whole without scrolling.
CUT = """() => [
  ...[document.scrollingElement.scrollWidth].filter((width) => width > innerWidth).map((width) => `the page is ${width} px wide`),
  ...[...document.querySelectorAll(".highlight-sh pre")].filter((pre) => pre.scrollWidth > pre.clientWidth)
    .map((pre) => "a command is cut: " + pre.textContent.split("\\n")[0]),
]"""
LINKS = """() => [
  [...document.querySelectorAll("[id]")].map((element) => element.id),
  [...document.querySelectorAll("a[href]")].map((link) => link.getAttribute("href")),
]"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def problems(pages: list[str], chromium: str, address: str, pictures: Path | None) -> Iterator[str]:
    """Yield what is wrong with these pages, each after the page's name, width and scheme."""
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    axe = Axe()
    ids: dict[str, set[str]] = {}
    links: list[tuple[str, str]] = []
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=chromium) as browser:
        for width in WIDTHS:
            for scheme in SCHEMES:
                tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                for page in pages:
                    tab.goto(f"{address}/{page}")
                    where = f"{page}, {width} px, {scheme}"
                    for found in axe.run(tab).response["violations"]:
                        for node in found["nodes"]:
                            yield f"{where}: {found['id']}: {node['html'][:160]}\n    {node['failureSummary']}"
                    yield from (f"{where}: {cut}" for cut in tab.evaluate(CUT))
                    if pictures is not None:
                        name = page.removesuffix(".html").replace("/", "-")
                        tab.screenshot(path=pictures / f"{name}-{width}-{scheme}.png", full_page=True)
                    if page not in ids:
                        here, targets = tab.evaluate(LINKS)
                        ids[page] = set(here)
                        links += [(page, urljoin(page, target)) for target in targets]
                tab.close()
    for page, link in links:
        target, place = map(unquote, urldefrag(link))
        if ":" in target:
            continue
        if not (SITE / target).exists():
            yield f"{page}: a link leads to {target}, which is not there"
        elif place and target in ids and place not in ids[target]:
            yield f"{page}: a link leads to {link}, and that page has no such place"


def main() -> int:
    """Look with the browser that the first argument names at all pages, or at those whose path holds one of the others.

    The folder after `--pictures` gets a picture of each.
    """
    browser, *chosen = sys.argv[1:]
    pictures = None
    if "--pictures" in chosen:
        at = chosen.index("--pictures")
        pictures = Path(chosen[at + 1])
        pictures.mkdir(parents=True, exist_ok=True)
        del chosen[at : at + 2]
    pages = sorted(page.relative_to(SITE) for page in SITE.rglob("*.html"))
    pages = [
        str(page)
        for page in pages
        if page.parts[0] not in NOT_OURS and any(part in str(page) for part in chosen or [""])
    ]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    count = 0
    for problem in problems(pages, browser, f"http://127.0.0.1:{server.server_port}", pictures):
        count += 1
        print(problem, flush=True)
    print(f"{len(pages)} pages, each {WIDTHS[0]} and {WIDTHS[1]} px wide, light and dark: {count or 'no'} problems")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
