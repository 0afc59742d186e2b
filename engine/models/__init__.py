"""Model definitions: one short module a family, found by the architecture name in config.json."""
