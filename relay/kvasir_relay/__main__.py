"""``python -m kvasir_relay``."""

from kvasir_relay.cli import main

main()
