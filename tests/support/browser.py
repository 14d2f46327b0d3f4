"""Look at a page in headless chromium: a screenshot, and what sticks out of the window or of its own frame."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1280, 900
# Of every element: is its right edge beyond the window, with no frame around it that scrolls? Is its text cut off?
PROBE = """<script>addEventListener('load', () => {
  const scrolls = node => node && (/auto|scroll/.test(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  const found = [];
  for (const closed of document.querySelectorAll('details')) closed.open = OPEN;
  if (document.documentElement.scrollWidth > innerWidth) found.push('page: ' + document.documentElement.scrollWidth);
  for (const node of document.body.querySelectorAll('*')) {
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    if (box.width && box.right > innerWidth + 1 && !scrolls(node)) found.push('outside: ' + node.tagName);
    if (/hidden|auto|scroll/.test(style.overflowX) && node.scrollWidth > node.clientWidth + 1)
      found.push('cut: ' + node.tagName + '.' + node.className + ' ' + node.scrollWidth);
  }
  for (const text of document.querySelectorAll('svg text')) {
    // The label of a nested picture, a bar of a timeline, is cut by design; its title says it all.
    const picture = text.closest('svg');
    if (picture.parentElement.closest('svg') || getComputedStyle(picture).overflow == 'visible') continue;
    const box = text.getBoundingClientRect(), frame = picture.getBoundingClientRect();
    const across = box.left < frame.left - 1 || box.right > frame.right + 1;
    if (across || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      found.push('outside its picture: ' + text.textContent.trim());
  }
  const note = document.createElement('pre');
  note.id = 'probe'; note.hidden = true; note.textContent = JSON.stringify({width: innerWidth, found});
  document.body.append(note);
})</script>"""


def chromium():
    """The browser's program: $CHROMIUM, or the first of the usual names that is installed; None without one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def browse(page, *more, folder, width=WIDTH):
    """Open an address; return what the browser prints. `more` are further words of its command line."""
    words = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--window-size={width},{HEIGHT}", f"--user-data-dir={folder}", *more, page]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def look(page, picture, *, opened=False):
    """Write a screenshot of the page to `picture`; return the window's width and what is clipped.

    opened: with all details open. A picture (.svg) stands alone on a page.
    """
    text = Path(page).read_text(encoding="utf-8")
    if Path(page).suffix == ".svg":
        text = f"<!DOCTYPE html><meta charset='utf-8'><body style='margin:0'>{text}</body>"
    probe = PROBE.replace("OPEN", "true" if opened else "false")
    probed = Path(picture).with_suffix(".probed.html")
    probed.write_text(text + probe, encoding="utf-8")
    folder = Path(picture).with_suffix(".profile")
    browse(probed.as_uri(), f"--screenshot={picture}", folder=folder)
    return probe_of(browse(probed.as_uri(), "--dump-dom", folder=folder))


def probe_of(document):
    """Return what a script of a page left in its element "probe", as JSON."""
    return json.loads(html.unescape(re.search(r'<pre id="probe"[^>]*>(.*?)</pre>', document, re.DOTALL)[1]))
