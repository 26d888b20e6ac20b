"""bridge.toml -> checked, frozen options, one module per table. Nothing is started here."""
