"""A headless browser of this machine, for the HTML pages: their tests and pictures."""

from __future__ import annotations

import shutil

from selenium import webdriver

NAMES = ("chromium", "chromium-browser", "google-chrome")  # as Debian, Ubuntu and Google name it


def start() -> webdriver.Chrome:
    """The browser, to be ended with `quit`. Raises LookupError without one."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    if not (browser and driver):
        raise LookupError("no chromium or no chromedriver: scripts/setup.sh all installs both")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    # As root it has no sandbox; small containers have a small /dev/shm.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1280,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
