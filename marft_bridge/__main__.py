"""`python -m marft_bridge` is `marft-bridge`."""

from marft_bridge.cli import main

main()
