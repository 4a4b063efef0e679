#!/usr/bin/env python3
"""Opens a report in headless Chromium, saves a screenshot, and checks it.

usage: check_report.py REPORT.html OUT.png [--width 1200] [--dark] [--pdf OUT.pdf]
Exit status 1 and one line for each fault: a page or console error, a request to the network, an svg of class
"chart" without a path or circle, a bad number in an attribute, or a page wider than the window.
Needs: pip install playwright; apt-get install chromium (or playwright install chromium).
"""
import argparse
import pathlib
import shutil
import sys

from playwright.sync_api import sync_playwright

FAULTS_IN_PAGE = """() => {
  const out = [];
  document.querySelectorAll('svg.chart').forEach((svg, i) => {
    const name = (svg.getAttribute('aria-label') || `chart ${i}`).slice(0, 60);
    if (![...svg.querySelectorAll('path, circle')].some(e => e.matches('circle') || (e.getAttribute('d') || '').length > 3))
      out.push(`${name}: no path or circle`);
  });
  document.querySelectorAll('svg *').forEach(e => { for (const a of e.attributes)
    if (/NaN|Infinity|undefined/.test(a.value)) out.push(`<${e.tagName} ${a.name}="${a.value.slice(0, 60)}">`); });
  document.querySelectorAll('svg text').forEach(e => {
    if (/NaN|Infinity|undefined|null/.test(e.textContent)) out.push(`text "${e.textContent}"`); });
  if (document.documentElement.scrollWidth > innerWidth) out.push(`page is ${document.documentElement.scrollWidth} px wide`);
  if (!document.querySelector('main').children.length) out.push('nothing on the page');
  return out;
}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("html")
    parser.add_argument("png")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--pdf")
    args = parser.parse_args()
    faults = []
    address = pathlib.Path(args.html).resolve().as_uri()
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": args.width, "height": 900},
                                color_scheme="dark" if args.dark else "light")
        page.on("pageerror", lambda e: faults.append(f"page error: {e}"))
        page.on("console", lambda m: m.type in ("error", "warning") and faults.append(f"console: {m.text}"))
        page.on("request", lambda r: r.url != address and faults.append(f"request: {r.url}"))
        page.goto(address)
        faults += page.evaluate(FAULTS_IN_PAGE)
        # Hover every chart and move by the arrow keys, which must raise no error.
        for svg in page.query_selector_all("svg.chart"):
            svg.hover()
            svg.focus()
            page.keyboard.press("ArrowRight")
            if not page.evaluate("[...document.querySelectorAll('.tip')].some(e => e.textContent)"):
                faults.append(f"no tooltip: {svg.get_attribute('aria-label')[:60]}")
            page.keyboard.press("Escape")
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.mouse.move(0, 0)
        page.screenshot(path=args.png, full_page=True)
        if args.pdf:
            page.pdf(path=args.pdf, format="A4", margin=dict.fromkeys(("top", "bottom", "left", "right"), "12mm"))
        browser.close()
    for fault in faults:
        print(f"{args.html}: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
