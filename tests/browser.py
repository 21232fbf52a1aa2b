"""A page in a browser: what a reader does with it, and what there is to see."""

from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait


class BrowserPage:
    """One page, opened. Its search has the ids `find` and `count`."""

    def __init__(self, driver: webdriver.Chrome, path: Path, text: str) -> None:
        path.write_text(text)
        self.driver, self.address = driver, path.as_uri()
        driver.get(self.address)

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def until(self, script: str) -> None:
        WebDriverWait(self.driver, 20).until(lambda _: self.run(f"return {script}"))

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def search(self, text: str) -> str:
        """Type it; the page's count of what it shows."""
        self.run("document.getElementById('count').textContent = '?'")
        entry = self.one("#find")
        entry.send_keys(Keys.CONTROL, "a")
        entry.send_keys(text or Keys.DELETE)
        self.until("document.getElementById('count').textContent !== '?'")
        return self.one("#count").text

    def open_without_script(self) -> None:
        for is_off in (True, False):
            self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": is_off})
            if is_off:
                self.driver.get(self.address)
