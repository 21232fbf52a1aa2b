"""Makes every node of the inventory debuggable: `pyinfra INVENTORY deploy.py`."""

from nodeready.deploys import debuggable

debuggable()
